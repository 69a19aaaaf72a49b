"""Decides how many drafted tokens a step verifies, and what a draft model does after it (docs/speculation.md).

A *draft* is a run of guesses at the next tokens of a sequence. It comes with a `Done`: from the process around the
controller, which knows token ids, or from the rank that samples, whose draft model proposes as many guesses as the step asks
for. A step that verifies some of them computes as many more positions, and samples one token for each guess that is right,
and one more. So drafts change when tokens come, and never which tokens.

The number of verified guesses follows from:

* The *chance* of a sequence that its next guess is right, learned from every sampled token, verified or not.
* The predicted time of the whole step with the guesses. They are added as long as the expected tokens per second rise, so
  the more a step computes otherwise, the fewer it verifies.
* The time to spare: the step stays within the TPOT targets of all decodes, and within the least slack of all prompts.
  Prefills are packed first. While a prompt is late, nothing is drafted.

Guesses of a draft model take time before it is known whether the next step can use them. As many are proposed as a step like
the present one would best verify if it proposed as many again. That must beat decodes that run ahead by the factor
`LEAST_GAIN`. Before its first guess for a sequence, the draft model computes the sequence's earlier tokens, piece by piece;
the expected output must be worth that. If no guess is proposed, the draft model does nothing.

Each lane has a draft model, which guesses for the sequences whose KV lies there alone. A sequence that is spread over
lanes, or becomes so, gets no guesses of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from medha.cost.correction import PartedSeconds
from medha.scheduler.draft_seconds import DraftSeconds, ProposalWork
from medha.scheduler.packer import Batch
from medha.scheduler.request import Request

WEIGHT = 0.125
"""Weight of one sampled token in the chance of its sequence."""
PRIOR_WEIGHT = 1 / 32
"""Weight of one sampled token in the chance of all sequences of a replica, once many have been judged."""
FIRST_TOKENS = 2
"""Weight of the initial chance of all sequences, in tokens. Until many are judged, that chance is a plain mean."""
PRIOR_TOKENS = 8.0
"""Weight of the chance of all sequences in that of one, in tokens; its own sampled tokens with guesses count 1 each."""
FORGETTING = 0.95
"""Factor by which each step that proposes no guess for a sequence reduces the weight of the sequence's own tokens."""
LEAST_CHANCE = 0.1
"""Smallest chance with which a guess is verified, however little time that is predicted to take."""
LEAST_GAIN = 1.03
"""Smallest factor by which guesses must raise the expected tokens per second for a draft model to propose them."""
PROBE_SHARE = 0.01
"""Share of the time that a draft model may take while it does not pay, to learn whether that has changed."""

Drafts = dict[str, tuple[int, ...]]
"""The guesses that a step verifies, by request."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of what a step verifies."""

    tokens_each: int  # of one sequence
    tokens: int  # of all sequences together
    seconds: float  # longest predicted time of the step


@dataclass(frozen=True, slots=True)
class Between:
    """The time between two steps that belongs to neither."""

    waiting_seconds: float = 0.0  # if the second one is launched when the first one has ended
    ahead_seconds: float = 0.0  # if it is launched ahead


@dataclass(slots=True)
class Drafted:
    """The guesses that a step verifies, and the expected rate of output tokens."""

    tokens_per_second: float
    drafts: Drafts = field(default_factory=dict)


@dataclass(slots=True)
class Proposals:
    """The work of a draft model after a step: the tokens that it computes, and then the guesses that it proposes."""

    counts: dict[str, int] = field(default_factory=dict)  # guesses to propose, by request
    follows: dict[str, int] = field(default_factory=dict)  # tokens to compute, by request
    seconds: float = 0.0
    uncorrected: PartedSeconds = field(default_factory=PartedSeconds)
    are_awaited: bool = False  # whether the next step should verify the guesses, and not only learn from them

    def __bool__(self) -> bool:
        return bool(self.counts or self.follows)


@dataclass(slots=True)
class DraftChance:
    """The chance that a guess is right, of all sequences of a replica."""

    chance: float = 0.5
    judged: int = 0  # guesses

    def of(self, request: Request) -> float:
        """Return the chance of a request that its next guess is right."""
        tokens = request.draft_tokens
        return (tokens * request.draft_chance + PRIOR_TOKENS * self.chance) / (tokens + PRIOR_TOKENS)

    def observe(self, request: Request, tokens: Sequence[int]) -> None:
        """Learn from the next sampled tokens of a request how often guesses are right; keep what is left of its draft."""
        draft = request.draft
        for token in tokens:
            if not draft:
                break
            is_right = draft[0] == token
            self._judge(request, is_right=is_right)
            draft = draft[1:] if is_right else ()
        request.draft = draft

    def missed(self, request: Request) -> None:
        """Record that a request got none of the guesses that were asked for, because its draft model has failed."""
        self._judge(request, is_right=False)
        request.followed = 0

    def _judge(self, request: Request, *, is_right: bool) -> None:
        request.draft_chance += (is_right - request.draft_chance) * WEIGHT
        request.draft_tokens += 1
        self.judged += 1
        self.chance += (is_right - self.chance) * max(PRIOR_WEIGHT, 1 / (FIRST_TOKENS + self.judged))


def choose_drafts(
    batch: Batch,
    decodes: Sequence[Request],
    limits: DraftLimits,
    chances: Mapping[str, float],
    *,
    between_seconds: float = 0.0,
    unknown_tokens: int = 0,
) -> Drafted:
    """Return the guesses that a step should verify, and add them to the `batch`, which already holds all else.

    Args:
        batch: the step, with its decodes and prefills.
        decodes: its decodes; none of those that run ahead verify guesses, because their drafts begin with the token in flight.
        limits: its bounds.
        chances: the chance of each decode with a draft that its next guess is right.
        between_seconds: time between two steps that belongs to neither.
        unknown_tokens: tokens of each sequence that an earlier step is yet to sample, and that their drafts begin with.
    """
    most = {
        request.id: _most(request, limits, unknown_tokens)
        for request in decodes
        if len(request.draft) > unknown_tokens and not request.runs_ahead
    }
    tokens = float(len(decodes))
    best = _Best(tokens / max(batch.seconds() + between_seconds, 1e-9))
    best.add(batch, _likeliest(decodes, most, chances, unknown_tokens), limits, tokens, between_seconds)
    drafts = {request.id: request.draft[: best.counts[request.id]] for request in best.taken}
    return Drafted(best.tokens_per_second, drafts)


@dataclass(slots=True)
class ProposalChoice:
    """Chooses what a draft model does after a step.

    It assumes that the next step is like this one, proposes as many guesses again, and is launched only when this one has
    ended. Without guesses it could run ahead.
    """

    batch: Batch  # the decodes of the step, without drafts and proposals; it is not changed
    # No guesses are made for those with a grammar, which the draft model ignores, nor for those spread over lanes.
    decodes: Sequence[Request]
    limits: DraftLimits  # bounds of the next step, and the longest time of this one
    chances: Mapping[str, float]  # of the decodes
    model: DraftSeconds
    between: Between
    most_tokens: int  # that the draft model may compute in a step
    _plain_seconds: float = 0.0
    _plain_rate: float = 0.0  # tokens per second without guesses

    def __post_init__(self) -> None:
        self._plain_seconds = self.batch.seconds()
        self._plain_rate = len(self.decodes) / max(self._plain_seconds + self.between.ahead_seconds, 1e-9)

    def choose(self) -> Proposals:
        """Return the best work; none if guesses do not pay."""
        rooms = self._rooms()
        counts, rate = self._best(rooms)
        worth = self._worth(counts, rate)
        if len(worth) < len(counts):
            counts, rate = self._best({name: rooms[name] for name in worth})
            worth = self._worth(counts, rate)
        if not worth:
            return Proposals()
        follows, ready = self._follow(worth)
        if len(ready) < len(counts):
            counts, _ = self._best({name: rooms[name] for name in ready})
        proposals = self._proposals(counts, follows)
        return proposals if proposals.seconds <= self.limits.seconds - self._plain_seconds else Proposals()

    def probe(self, seconds: float, *, most: int = 1, is_whole: bool = False) -> Proposals:
        """Return a guess for each of the up to `most` cheapest sequences, if that takes at most `seconds`.

        Return none if guesses would not pay even if all were right. To compute the tokens before a guess may take
        several steps. If the probe `is_whole`, all of them together take at most `seconds`, and there may be fewer
        guesses.
        """
        rooms = self._rooms()
        followed = [request for request in self.decodes if request.id in rooms]
        cheapest = sorted(followed, key=lambda request: (_behind(request), request.tie))
        del cheapest[max(min(most, self.limits.tokens), 0) :]
        while is_whole and cheapest and self._seconds_of_one_each(cheapest) > seconds:
            cheapest.pop()
        if not cheapest:
            return Proposals()
        follows, ready = self._follow([request.id for request in cheapest])
        proposals = self._proposals(dict.fromkeys(ready, 1), follows, are_awaited=False)
        if proposals.seconds > min(seconds, self.limits.seconds - self._plain_seconds):
            return Proposals()
        return proposals if self._best(rooms, dict.fromkeys(rooms, 1.0))[0] else Proposals()

    def _rooms(self) -> dict[str, int]:
        """Return how many guesses may be proposed, by request."""
        # This step and the next one sample a token in any case.
        rooms = {
            request.id: min(
                self.limits.tokens_each,
                request.limit_tokens - request.length - 2,
                request.reserved_tokens - request.length - 1,
            )
            for request in self.decodes
            if not request.grammar and not request.is_spread
        }
        return {name: count for name, count in rooms.items() if count > 0}

    def _best(
        self, rooms: Mapping[str, int], chances: Mapping[str, float] | None = None
    ) -> tuple[dict[str, int], float]:
        """Return the numbers of guesses with the highest rate, and that rate, in tokens per second; none if they pay too little.

        The time to compute the tokens before them does not count here.
        """
        best = _Best(self._plain_rate * LEAST_GAIN)
        guesses = _likeliest(self.decodes, rooms, self.chances if chances is None else chances, 0)
        tokens = float(len(self.decodes))
        best.add(self.batch, guesses, self.limits, tokens, self.between.waiting_seconds, self.model)
        counts = {name: count for name, count in best.counts.items() if count}
        best.remove(self.batch)
        return counts, best.tokens_per_second

    def _worth(self, counts: Collection[str], rate: float) -> list[str]:
        """Return which requests save at least the time that it takes to compute the tokens before their guesses."""
        if not counts:
            return []
        saved = (1 - self._plain_rate / rate) / self._plain_rate  # seconds, for each token of a sequence
        return [
            request.id
            for request in self.decodes
            if request.id in counts
            and self.model.of(0, 0, _behind(request)) <= saved * expected_tokens(request)
        ]

    def _follow(self, names: Collection[str]) -> tuple[dict[str, int], list[str]]:
        """Return the tokens to compute now, by request, and the requests of which none are left after that.

        On each lane, they take at most as long as the step without them.
        """
        seconds = min(self.limits.seconds - self._plain_seconds, self._plain_seconds)
        follows, ready = dict[str, int](), list[str]()
        wanting = [request for request in self.decodes if request.id in names]
        most = min(self.most_tokens, max(self.model.tokens_within(seconds), 0))
        left = {request.lane: most for request in wanting}
        for request in sorted(wanting, key=lambda request: (_behind(request), request.tie)):
            behind = _behind(request)
            count = int(min(behind, left[request.lane]))
            left[request.lane] -= count
            if count:
                follows[request.id] = count
            if count == behind:
                ready.append(request.id)
        return follows, ready

    def _proposals(
        self, counts: dict[str, int], follows: dict[str, int], *, are_awaited: bool = True
    ) -> Proposals:
        works: dict[int, ProposalWork] = {}
        for request in self.decodes:
            count, tokens = counts.get(request.id, 0), follows.get(request.id, 0)
            if count or tokens:
                work = works.setdefault(request.lane, ProposalWork())
                work.rounds = max(work.rounds, count)
                work.guesses += count
                work.tokens += tokens
        longest = self.model.longest(works.values())
        uncorrected = self.model.uncorrected(longest.rounds, longest.guesses, longest.tokens)
        return Proposals(
            counts, follows, self.model.of_work(longest), uncorrected, are_awaited and bool(counts)
        )

    def _seconds_of_one_each(self, requests: Sequence[Request]) -> float:
        """Return the time to propose a guess for each of these requests, after the tokens before it."""
        works: dict[int, ProposalWork] = {}
        for request in requests:
            work = works.setdefault(request.lane, ProposalWork())
            work.propose(1)
            work.tokens += _behind(request)
        return self.model.of_work(self.model.longest(works.values()))


def _behind(request: Request) -> int:
    """Return how many tokens the draft model has yet to compute before it can propose guesses for a request."""
    return max(request.dispatched - request.followed, 0)


def expected_tokens(request: Request) -> int:
    """Return how much more output is expected of a request: at least as much as it has already."""
    output = request.output_tokens
    return min(request.limit_tokens - request.length, max(request.expected_output_tokens - output, output))


_Guess = tuple[float, int, Request]
"""The chance of a guess, a number that orders equal chances, and the sequence."""


def _likeliest(
    decodes: Sequence[Request], most: Mapping[str, int], chances: Mapping[str, float], unknown_tokens: int
) -> list[_Guess]:
    """Return up to `most` guesses of each request, the likeliest first."""
    guesses = [
        (chances[request.id] ** (unknown_tokens + index + 1), -request.tie, request)
        for request in decodes
        if request.id in most
        for index in range(most[request.id])
    ]
    # Each guess of a request is less likely than the one before, so these stay in order.
    return sorted((one for one in guesses if one[0] >= LEAST_CHANCE), key=lambda one: one[:2], reverse=True)


@dataclass(slots=True)
class _Best:
    """The likeliest guesses that raise the expected tokens per second of a step most."""

    tokens_per_second: float  # the rate that guesses must exceed, then the rate with the taken ones
    taken: list[Request] = field(default_factory=list)  # one for each guess
    counts: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        batch: Batch,
        guesses: Sequence[_Guess],
        limits: DraftLimits,
        expected_tokens: float,
        between_seconds: float,
        model: DraftSeconds | None = None,
    ) -> None:
        """Add the best number of guesses to the batch; with a draft model, the batch proposes as many again."""
        kept, proposal_seconds = 0, 0.0
        proposed: dict[int, ProposalWork] = {}  # by lane
        for chance, _, request in guesses[: max(limits.tokens, 0)]:
            count = self.counts[request.id] = self.counts.get(request.id, 0) + 1
            batch.add_drafted(
                request.lane, _held(request), request.dispatched, count, is_masked=request.grammar != ""
            )
            self.taken.append(request)
            seconds = batch.seconds()
            if model is not None:
                work = proposed.setdefault(request.lane, ProposalWork())
                work.propose(count)
                proposal_seconds = max(
                    proposal_seconds, model.of_work(work)
                )  # lanes propose at the same time
                seconds += proposal_seconds
            if seconds > limits.seconds:
                break
            expected_tokens += chance
            rate = expected_tokens / max(seconds + between_seconds, 1e-9)
            if rate > self.tokens_per_second:
                self.tokens_per_second, kept = rate, len(self.taken)
        self.remove(batch, kept)

    def remove(self, batch: Batch, kept: int = 0) -> None:
        """Remove all but the first `kept` guesses from the batch."""
        for request in reversed(self.taken[kept:]):
            count = self.counts[request.id]
            batch.remove_drafted(
                request.lane, _held(request), request.dispatched, count, is_masked=request.grammar != ""
            )
            self.counts[request.id] -= 1
        del self.taken[kept:]


def _most(request: Request, limits: DraftLimits, unknown_tokens: int) -> int:
    """Return how many guesses of a request a step may verify.

    They need KV that it holds, on lanes that take part already, and one more token follows them.
    """
    return max(
        0,
        min(
            len(request.draft) - unknown_tokens,
            limits.tokens_each,
            request.limit_tokens - request.length - 1,
            request.reserved_tokens - request.length,
            request.joins_at - request.dispatched - 2,
        ),
    )


def _held(request: Request) -> dict[int, int]:
    """Return the KV of a request by lane if several take part, else nothing."""
    return request.lane_tokens if request.is_spread else {}
