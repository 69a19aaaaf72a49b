"""Decides how many drafted tokens a step verifies, and how many a draft model draws (docs/speculation.md).

A *draft* is a guess at the tokens that come behind those of a sequence. It comes with a `Done`: from the process around
the controller, which knows token ids, or from the rank that samples, whose draft model has drawn as many as the step asked
for. A step that verifies some of it computes as many positions more, and samples one token for each guess that turns out
right, and one behind them. So drafts change when tokens come, and never which.

How many are verified follows from a few numbers:

* The *chance* of a sequence that one more guess is right. Every sampled token counts, whether or not its guess was verified.
* The predicted time of the whole step with them. They are worth it as long as the expected tokens per second rise, so
  fewer are verified the more the device has to compute anyhow.
* The time that nobody misses: the step stays within the TPOT targets of all decodes, and within the slack of the prompt
  that has least. Prefills are packed first. While a prompt is late, nothing is drafted.

Guesses of a draft model take time before anybody knows whether the next step can use them. So many are drawn as a step like
the present one would best verify if it drew as many again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from medha.scheduler.packer import Batch
from medha.scheduler.request import Request
from medha.wire.messages import DraftCosts

WEIGHT = 0.125
"""Weight of one sampled token in the chance of its sequence."""
LEAST_CHANCE = 0.1
"""Smallest chance with which a guess is verified, however little time that is predicted to take."""
PROBE_STEPS = 16
"""Steps after which one guess is drawn for each sequence that has none, so that its chance is learned again."""

Drafts = dict[str, tuple[int, ...]]
"""The guesses that a step verifies, by request."""


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Bounds of what a step verifies."""

    tokens_each: int  # of one sequence
    tokens: int  # of all sequences together
    seconds: float  # longest predicted time of the step


@dataclass(slots=True)
class Drafted:
    """The guesses that a step verifies, and the expected rate of output tokens."""

    tokens_per_second: float
    drafts: Drafts = field(default_factory=dict)


@dataclass(slots=True)
class Draws:
    """The numbers of guesses that a draft model draws in a step, by request, and the time that takes."""

    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    are_awaited: bool = False  # whether the next step should verify them, and not only learn from them


def observe(request: Request, tokens: Sequence[int]) -> None:
    """Learn from the next sampled tokens of a request how often its draft is right; keep what is left of the draft."""
    draft = request.draft
    for token in tokens:
        if not draft:
            break
        is_right = draft[0] == token
        request.draft_chance += (is_right - request.draft_chance) * WEIGHT
        draft = draft[1:] if is_right else ()
    request.draft = draft


def choose_drafts(
    batch: Batch,
    decodes: Sequence[Request],
    limits: DraftLimits,
    *,
    between_seconds: float = 0.0,
    unknown_tokens: int = 0,
) -> Drafted:
    """Return what a step best verifies, and leave that in the `batch`, which already holds all else.

    Args:
        batch: the step, with its decodes and prefills.
        decodes: its decodes; nothing is verified of those that run ahead, because a draft begins with the token in flight.
        limits: its bounds.
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
    best.add(batch, _likeliest(decodes, most, unknown_tokens), limits, tokens, between_seconds)
    drafts = {request.id: request.draft[: best.counts[request.id]] for request in best.taken}
    return Drafted(best.tokens_per_second, drafts)


def choose_draws(
    batch: Batch,
    decodes: Sequence[Request],
    limits: DraftLimits,
    costs: DraftCosts,
    *,
    between_seconds: float = 0.0,
    probes: bool = False,
) -> Draws:
    """Return what a draft model best draws in a step, for the next one to verify.

    The next step is taken to be like this one, to draw as many guesses again, and to come only once this one has ended.
    Without guesses it could run ahead.

    Args:
        batch: the step, with its decodes and prefills, but without drafts and draws; it is not changed.
        decodes: its decodes; no guesses are drawn for those with a grammar, which the draft model does not follow.
        limits: bounds of the next step; this one is not to take longer, either.
        costs: times of guesses.
        between_seconds: time between two steps that belongs to neither.
        probes: whether to draw one guess for each sequence that has none, to learn how likely it is.
    """
    # This step and the next one sample a token in any case.
    room = {
        request.id: min(
            limits.tokens_each,
            request.limit_tokens - request.length - 2,
            request.reserved_tokens - request.length - 1,
        )
        for request in decodes
        if not request.grammar and not request.is_spread
    }
    most = {name: count for name, count in room.items() if count > 0}
    plain_seconds, tokens = batch.seconds(), float(len(decodes))
    best = _Best(tokens / max(plain_seconds, 1e-9))
    best.add(batch, _likeliest(decodes, most, 0), limits, tokens, between_seconds, costs)
    chosen = {name: count for name, count in best.counts.items() if count}
    best.remove(batch)
    room_seconds = limits.seconds - plain_seconds
    draws = _draws(chosen, costs, are_awaited=bool(chosen))
    if draws.seconds > room_seconds:
        draws = Draws()
    # A guess doubles the tokens of a step at most.
    if probes and _draw_seconds(1, len(most), costs) < plain_seconds:
        probed = dict.fromkeys(list(most)[: max(limits.tokens, 0)], 1) | draws.counts
        probing = _draws(probed, costs, are_awaited=draws.are_awaited)
        draws = probing if probing.seconds <= room_seconds else draws
    return draws


def _draws(counts: dict[str, int], costs: DraftCosts, *, are_awaited: bool) -> Draws:
    seconds = _draw_seconds(max(counts.values(), default=0), sum(counts.values()), costs)
    return Draws(counts, seconds, are_awaited)


def _draw_seconds(rounds: int, guesses: int, costs: DraftCosts) -> float:
    """Return the time that a draft model takes to draw so many guesses, in so many rounds of one for each sequence."""
    if rounds == 0:
        return 0.0
    return costs.first_seconds + (rounds - 1) * costs.round_seconds + guesses * costs.row_seconds


_Guess = tuple[float, int, Request]
"""The chance of a guess, a number that orders equal ones, and the sequence that it is of."""


def _likeliest(decodes: Sequence[Request], most: Mapping[str, int], unknown_tokens: int) -> list[_Guess]:
    """Return up to `most` guesses of each request, the likeliest first."""
    guesses = [
        (request.draft_chance ** (unknown_tokens + index + 1), -request.tie, request)
        for request in decodes
        if request.id in most
        for index in range(most[request.id])
    ]
    # Each guess of a request is less likely than the one before, so these stay in order.
    return sorted((one for one in guesses if one[0] >= LEAST_CHANCE), key=lambda one: one[:2], reverse=True)


@dataclass(slots=True)
class _Best:
    """The likeliest guesses that raise the expected tokens per second of a step most."""

    tokens_per_second: float  # without guesses, and then with those that are taken
    taken: list[Request] = field(default_factory=list)  # one for each guess
    counts: dict[str, int] = field(default_factory=dict)

    def add(
        self,
        batch: Batch,
        guesses: Sequence[_Guess],
        limits: DraftLimits,
        expected_tokens: float,
        between_seconds: float,
        costs: DraftCosts | None = None,
    ) -> None:
        """Add the best number of guesses to the batch; with `costs`, the batch draws as many again."""
        kept = rounds = 0
        for chance, _, request in guesses[: max(limits.tokens, 0)]:
            count = self.counts[request.id] = self.counts.get(request.id, 0) + 1
            batch.add_drafted(
                request.lane, _held(request), request.dispatched, count, is_masked=request.grammar != ""
            )
            self.taken.append(request)
            if costs is not None:
                rounds = max(rounds, count)
                batch.draw(request.lane, _draw_seconds(rounds, len(self.taken), costs))
            seconds = batch.seconds()
            if seconds > limits.seconds:
                break
            expected_tokens += chance
            rate = expected_tokens / max(seconds + between_seconds, 1e-9)
            if rate > self.tokens_per_second:
                self.tokens_per_second, kept = rate, len(self.taken)
        if costs is not None and self.taken:
            batch.draw(self.taken[0].lane, 0.0)
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
