"""Measure what traces cost the loops of a router and a controller: off, on for a request that is not sampled, and sampled.

    python benchmarks/traces.py --quick
    python benchmarks/traces.py --json benchmarks/results/traces.json

* router: the happenings of a request with 16 output tokens, as the timeline of `/ui` takes them anyway, and its spans.
* replica: the happenings and steps of a sequence with 40 chunks and 16 output tokens, and its spans when it ends.

Times are CPU times of the thread that would be the loop. Spans are exported by another thread to a port where nobody listens, so
that the cost of a dead collector is part of the figures. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from harness import Loop, Row, claim, exit_with, in_turn, parser, report, table

from medha.observing.timeline import Began, Computed, Finished, Placed, Sampled, Timeline
from medha.routing.router_core import RouterCore
from medha.routing.router_events import Send
from medha.wire.messages import Extent, Step, StepEntry, Submit
from medha_router.request_spans import RequestSpans, TracedTimeline
from medha_traces.exporting import SpanSource
from medha_traces.sequence_spans import SequenceSpans
from medha_traces.switch import Destination

OUTPUT_TOKENS = 16
CHUNKS = 40
SAMPLED = f"00-{'1' * 32}-{'2' * 16}-01"
NOBODY = "http://127.0.0.1:9/v1/traces"
MOST_LOOPS_UNSAMPLED = 0.2
"""The most that a request that is not sampled may cost the router, beyond its timeline."""
MOST_LOOPS_SAMPLED = 2.0
"""The most that a sampled request may cost the router: a fifth of a step of ten loops."""
MOST_LOOPS_REPLICA = 10.0
"""The most that a sampled sequence of 40 chunks may cost the controller: a step of ten loops, for at least 56 steps."""


def request(number: int, timeline: Timeline, spans: RequestSpans | None, headers: dict[str, str]) -> None:
    """Play a request of the router: its span as HTTP sees it, and one sequence."""
    id_, core = f"cmpl-{number:032x}-0", RouterCore()

    def happen() -> None:
        timeline.take(Began(id_, 1000, "default", "tiny", "", 2.0, 0.05), 0.0)
        if spans is not None:
            spans.forwarded(Send("r0", Submit(id_, "p", 1000, 1000, 0)), core)
        timeline.take(Placed(id_, "r0"), 0.1)
        for token in range(OUTPUT_TOKENS):
            timeline.take(Sampled(id_, 1), 1.0 + 0.05 * token)
        timeline.take(Finished(id_, "length"), 2.0)

    if spans is None:
        happen()
        return
    span = spans.source.serve("POST", headers, {"http.request.method": "POST"})
    with span.as_current():
        for phase in ("receive body", "tokenise"):
            with spans.phase(phase):
                pass
        happen()
    span.end()


def sequence(number: int, spans: SequenceSpans, source: SpanSource, trace: str) -> None:
    """Play a sequence of a replica."""
    id_ = f"cmpl-{number:032x}-0"
    if trace:
        spans.announce(id_, trace)
    if not len(spans):
        return  # as the controller does
    spans.take(Began(id_, 1000, "default"), 0.0)
    spans.take(Placed(id_, "r0"), 0.0)
    for index in range(CHUNKS):
        spans.launched(Step(index, 0, (StepEntry(id_, 0, (Extent(0, 25),), False),)), 0.1 * index)
        spans.take(Computed(id_, 0.1 * index, 25, 0, index == 0), 0.1 * index + 0.09)
    for token in range(OUTPUT_TOKENS):
        spans.take(Sampled(id_, 1), 4.1 + 0.05 * token)
    spans.take(Finished(id_, "length"), 6.0)
    for found, facts in spans.ended():
        source.add(found, facts)


def _uncounted(_reason: str, _spans: int) -> None:
    """Ignore spans that are lost: nobody listens, so most of them are."""


def timed(repeats: int, play: Callable[[int], None]) -> float:
    """Return the CPU seconds of this thread for one run of `play`."""
    started = time.thread_time()
    for number in range(repeats):
        play(number)
    return (time.thread_time() - started) / repeats


def main() -> int:
    arguments = parser(__doc__, quick="seconds instead of half a minute", rounds=25).parse_args()
    rounds, repeats = (min(arguments.rounds, 5), 100) if arguments.quick else (arguments.rounds, 400)
    source = SpanSource.exporting(Destination(NOBODY, "the benchmark"), 0.0, "medha-router", "0", _uncounted)
    spans = RequestSpans(source)
    plain, traced, replica = Timeline(0.0), TracedTimeline(0.0, spans), SequenceSpans("r0")
    loop = Loop()
    variants = {
        "router, off": partial(request, timeline=plain, spans=None, headers={}),
        "router, not sampled": partial(request, timeline=traced, spans=spans, headers={}),
        "router, sampled": partial(request, timeline=traced, spans=spans, headers={"traceparent": SAMPLED}),
        "replica, not sampled": partial(sequence, spans=replica, source=source, trace=""),
        "replica, sampled": partial(sequence, spans=replica, source=source, trace=SAMPLED),
    }
    measured: dict[str, Callable[[], float]] = {
        name: partial(timed, repeats, play) for name, play in variants.items()
    }
    taken = in_turn(rounds, {**measured, "loop": loop.sample})
    seconds = {name: statistics.median(taken[name]) for name in measured}
    table(("", "us each"), ((name, found * 1e6) for name, found in seconds.items()))
    off = seconds["router, off"]
    claims: list[Row] = [
        claim(name, loop.ratio(value), "loops", goal, peer=loop.peer())
        for name, value, goal in (
            ("a request that is not sampled", seconds["router, not sampled"] - off, MOST_LOOPS_UNSAMPLED),
            ("a sampled request, in the router", seconds["router, sampled"] - off, MOST_LOOPS_SAMPLED),
            (
                "a sampled sequence of 40 chunks, at its replica",
                seconds["replica, sampled"],
                MOST_LOOPS_REPLICA,
            ),
        )
    ]
    figures = {"microseconds": {name: round(found * 1e6, 2) for name, found in seconds.items()}}
    return report(claims, arguments.json, figures, strict=True)


if __name__ == "__main__":
    exit_with(main)
