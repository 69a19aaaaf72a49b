"""The decisions of `chaos.py`: which faults happen when and to whom, what became of each attempt, and the claims.

Nothing here starts a process or reads a clock. Times are in seconds.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness import Row, claim

FREEZE_SECONDS = 6.0
"""Time for which a process is stopped; it is longer than routers and controllers wait for each other (2 and 4 s)."""
CUT_SECONDS = 6.0
SLOW_SECONDS = 8.0
FULL_SECONDS = 5.0
CLOCK_SECONDS = 4.0
KILL_SECONDS = 2.0
"""Time for which clients go on beside a killed process before it is replaced, if nothing replaces it by itself."""

STREAM_SECONDS = 90.0
"""Longest wait for output after which a stream counts as hanging: longer than any limit of a router (60 s)."""
ANSWER_SECONDS = 600.0
"""The same for an answer that is no stream, which arrives at its end; the machine may be very busy."""

Outcome = Literal["exact", "error", "unclear", "wrong", "hang"]
OUTCOMES: tuple[Outcome, ...] = ("exact", "error", "unclear", "wrong", "hang")


@dataclass(frozen=True)
class Kind:
    """A kind of fault: what it hits, how long it lasts, and whether it hits a router."""

    name: str
    action: str
    part: Literal["router", "replica", "controller", "rank", "link"]
    seconds: float

    @property
    def hits_router(self) -> bool:
        return self.part == "router"


KINDS = (
    Kind("kill a router", "kill", "router", KILL_SECONDS),
    Kind("kill a replica", "kill", "replica", KILL_SECONDS),
    Kind("kill a controller", "kill", "controller", KILL_SECONDS),
    Kind("kill a rank", "kill", "rank", KILL_SECONDS),
    Kind("freeze a router", "freeze", "router", FREEZE_SECONDS),
    Kind("freeze a replica", "freeze", "replica", FREEZE_SECONDS),
    Kind("cut a router off", "cut", "router", CUT_SECONDS),
    Kind("cut a replica off", "cut", "replica", CUT_SECONDS),
    Kind("cut one link", "cut", "link", CUT_SECONDS),
    Kind("slow links of a replica", "slow", "replica", SLOW_SECONDS),
    Kind("full disk of a router", "fill", "router", FULL_SECONDS),
    Kind("full disk of a replica", "fill", "replica", FULL_SECONDS),
    Kind("clock of a router jumps", "jump", "router", CLOCK_SECONDS),
    Kind("clock of a replica jumps", "jump", "replica", CLOCK_SECONDS),
)
BY_NAME = {kind.name: kind for kind in KINDS}
QUICK = ("kill a router", "freeze a replica")
ENDING = ("kill", "freeze")
"""Actions that a process cannot suffer twice at the same time."""


@dataclass(frozen=True)
class Fault:
    """A fault with its victim: numbers of a router and a replica, of which a kind may need only one."""

    kind: Kind
    router: int
    replica: int
    after_seconds: float = 0.0  # since the first fault of its episode
    forward: bool = True  # in which direction a clock jumps

    def __str__(self) -> str:
        names = {"router": f"router {self.router}", "link": f"router {self.router}, replica {self.replica}"}
        return f"{self.kind.name} ({names.get(self.kind.part, f'replica {self.replica}')})"

    @property
    def victim(self) -> tuple[str, int] | None:
        """The router or replica that the fault hits; None for a link, which belongs to two."""
        if self.kind.part == "link":
            return None
        return ("router", self.router) if self.kind.hits_router else ("replica", self.replica)


@dataclass(frozen=True)
class Plan:
    """The faults of an episode: one, or two at about the same time."""

    key: str
    faults: tuple[Fault, ...]

    @property
    def row(self) -> str:
        """The row of the table that it belongs to."""
        return self.faults[0].kind.name if len(self.faults) == 1 else "two of these at once"


def schedule(
    seed: int, rounds: int, pairs: int, kinds: Sequence[Kind], routers: int = 3, replicas: int = 3
) -> list[Plan]:
    """Return the episodes: in each round every kind once, in another order, and then so many pairs.

    A round does not depend on how many rounds follow, so a longer run goes on from a shorter one.
    """
    found = []
    for number in range(rounds):
        dice = random.Random(f"{seed} {number}")
        order = dice.sample(list(kinds), len(kinds))
        for kind in order:
            fault = Fault(
                kind, dice.randrange(routers), dice.randrange(replicas), forward=dice.random() < 0.5
            )
            found.append(Plan(f"round {number}: {kind.name}", (fault,)))
        found += [
            Plan(f"round {number}: pair {pair}", _pair(dice, kinds, routers, replicas))
            for pair in range(pairs if len(kinds) > 1 else 0)
        ]
    return found


def _pair(dice: random.Random, kinds: Sequence[Kind], routers: int, replicas: int) -> tuple[Fault, Fault]:
    while True:
        first, second = (
            Fault(kind, dice.randrange(routers), dice.randrange(replicas), forward=dice.random() < 0.5)
            for kind in dice.sample(list(kinds), 2)
        )
        both_end_it = first.kind.action in ENDING and second.kind.action in ENDING
        if first.victim != second.victim or not both_end_it:
            after = dice.uniform(0.0, 2.0)
            return first, Fault(
                second.kind, second.router, second.replica, after_seconds=after, forward=second.forward
            )


@dataclass
class Attempt:
    """A request to one router, and what came back; a client that gets an error makes another attempt elsewhere.

    Args:
        router: the number of the router that it went to.
        text: the output so far.
        times: when parts of the output arrived, after `began`.
        ended: when it was over; None while it is open.
        finished: whether the answer said that it is complete.
        error: the error as the client saw it.
        says_why: whether the error has a reason: a code and a message, or a connection that broke.
        streams: whether its output arrives in parts; else it arrives at the end, and has no pauses.
    """

    router: int
    question: int
    began: float
    streams: bool = True
    text: str = ""
    times: list[float] = field(default_factory=list)
    ended: float | None = None
    finished: bool = False
    error: str = ""
    says_why: bool = True

    def outcome(self, expected: str) -> Outcome:
        """Return what became of it. A text that breaks off without an error is wrong, and so is one that differs."""
        if not expected.startswith(self.text):
            return "wrong"
        if self.ended is None:
            return "hang"
        if self.error:
            return "error" if self.says_why else "unclear"
        return "exact" if self.finished and self.text == expected else "wrong"

    def hangs(self, since: float, now: float) -> bool:
        """Return whether nothing has come for too long since a fault was over."""
        most = STREAM_SECONDS if self.streams else ANSWER_SECONDS
        last = max([since, self.began, *self.times[-1:]])
        return self.ended is None and now - last > most

    def pause(self, since: float, until: float) -> float:
        """Return a stream's longest wait for output that lasted at some time since a fault; 0 if it was over by then."""
        if not self.streams:
            return 0.0
        end = until if self.ended is None else self.ended
        times = [self.began, *self.times, end]
        return max(
            (after - before for before, after in itertools.pairwise(times) if after >= since), default=0.0
        )


def account(
    attempts: Iterable[Attempt], expected: Sequence[str], hit: Iterable[int], since: float, until: float
) -> Row:
    """Return the figures of an episode; `hit` are the routers that a fault hit.

    Errors are counted on all routers, and again on those that no fault hit. A pause is the longest wait for output.
    """
    hit = set(hit)
    found: Row = {"sent": 0, **dict.fromkeys(OUTCOMES, 0), "errors_elsewhere": 0}
    pauses = {True: 0.0, False: 0.0}
    errors: dict[str, int] = {}
    for one in attempts:
        outcome = one.outcome(expected[one.question])
        found["sent"] += 1
        found[outcome] += 1
        if outcome in ("error", "unclear"):
            name = f"router {one.router}: {one.error}"
            errors[name] = errors.get(name, 0) + 1
            found["errors_elsewhere"] += one.router not in hit
        is_hit = one.router in hit
        pauses[is_hit] = max(pauses[is_hit], one.pause(since, until))
    found["pause_seconds"] = round(max(pauses.values()), 2)
    found["pause_elsewhere_seconds"] = round(pauses[False], 2)
    return found | {"errors": errors}


LEFT_IN_TIERS = ("held_blocks", "stray_in_files", "stray_objects")
"""Blocks that idle replicas hold in tiers for somebody; files that are unfinished, uncounted blocks and files that only some
ranks of a lane have; and what is in the store beside whole objects and the key of hashes."""
SUMMED = (
    "sent", *OUTCOMES, "errors_elsewhere", "unanswered", "left_over", *LEFT_IN_TIERS,
)  # fmt: skip
MOST = ("pause_seconds", "pause_elsewhere_seconds", "fetched_blocks", "read_blocks")
"""Figures of which the largest one counts. Blocks that came from host tiers, and those that came from files or the store, are
counted by the epochs that go on at the end of an episode."""


def summary(episodes: Iterable[Mapping[str, Row]] | Iterable[Row]) -> list[Row]:
    """Return a row for each kind of fault, one for pairs, and one for all."""
    groups: dict[str, list[Row]] = {}
    every = list(episodes)
    names = [*(kind.name for kind in KINDS), "two of these at once"]
    for one in sorted(every, key=lambda one: names.index(str(one["row"]))):
        groups.setdefault(str(one["row"]), []).append(dict(one))
    found = [_sum(name, rows) for name, rows in groups.items()]
    return [*found, _sum("all", [dict(one) for one in every])] if every else []


def _sum(name: str, rows: Sequence[Row]) -> Row:
    found: Row = {"fault": name, "episodes": len(rows)}
    found |= {column: sum(row[column] for row in rows) for column in SUMMED}
    return found | {column: max((row[column] for row in rows), default=0.0) for column in MOST}


def claims(episodes: Sequence[Row], *, are_many: bool = True) -> list[Row]:
    """Return the claims over all episodes; only if they `are_many`, KV must have come back from each tier."""
    found = summary(episodes)
    total = found[-1] if found else _sum("all", [])
    ended = total["exact"] + total["error"]
    came = [
        claim("blocks that came from host tiers", total["fetched_blocks"], "", 1, "more"),
        claim("blocks that came from files or the store", total["read_blocks"], "", 1, "more"),
    ]
    return [
        claim("attempts that are neither exact nor one clear error", total["sent"] - ended, "", 0),
        claim("attempts that hang", total["hang"], "", 0),
        claim("wrong texts", total["wrong"], "", 0),
        claim("errors at routers that no fault hit", total["errors_elsewhere"], "", 0),
        claim("questions without an answer in the end", total["unanswered"], "", 0),
        claim("episodes after which KV or requests were held", total["left_over"], "", 0),
        claim("blocks that idle replicas held in tiers", total["held_blocks"], "", 0),
        claim("unfinished, uncounted or partial files in disk tiers", total["stray_in_files"], "", 0),
        claim("unfinished objects in the store", total["stray_objects"], "", 0),
        *(came if are_many else ()),
        claim("exact answers", total["exact"], "", 1, "more"),
    ]
