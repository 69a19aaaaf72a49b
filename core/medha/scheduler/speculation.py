"""Decides how many drafted tokens a step verifies (docs/speculation.md).

A *draft* is a guess at the tokens that come behind those of a sequence. It comes with a `Done`, from the process around
the controller, which knows token ids. A step that verifies some of it computes as many positions more, and samples one
token for each guess that turns out right, and one behind them. So drafts change when tokens come, and never which.

How many are verified follows from a few numbers:

* The *chance* of a sequence that one more guess is right. Every sampled token counts, whether or not its guess was verified.
* The predicted time of the whole step with them. They are worth it as long as the expected tokens per second rise, so
  fewer are verified the more the device has to compute anyhow.
* The time that nobody misses: the step stays within the TPOT targets of all decodes, and within the slack of the prompt
  that has least. Prefills are packed first. While a prompt is late, nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from medha.scheduler.packer import Batch
from medha.scheduler.request import Request

WEIGHT = 0.125
"""Weight of one sampled token in the chance of its sequence."""
LEAST_CHANCE = 0.1
"""Smallest chance with which a guess is verified, however little time that is predicted to take."""

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
    expected_tokens = float(len(decodes))
    best = Drafted(expected_tokens / max(batch.seconds() + between_seconds, 1e-9))
    guesses = [
        (request.draft_chance ** (unknown_tokens + index + 1), -request.tie, request)
        for request in decodes
        if len(request.draft) > unknown_tokens and not request.runs_ahead
        for index in range(_most(request, limits, unknown_tokens))
    ]
    # Each guess of a request is less likely than the one before, so these stay in order.
    guesses = sorted(
        (one for one in guesses if one[0] >= LEAST_CHANCE), key=lambda one: one[:2], reverse=True
    )
    taken: list[Request] = []
    counts: dict[str, int] = {}
    kept = 0
    for chance, _, request in guesses[: max(limits.tokens, 0)]:
        count = counts[request.id] = counts.get(request.id, 0) + 1
        batch.add_drafted(
            request.lane, _held(request), request.dispatched, count, is_masked=request.grammar != ""
        )
        taken.append(request)
        seconds = batch.seconds()
        if seconds > limits.seconds:
            break
        expected_tokens += chance
        rate = expected_tokens / max(seconds + between_seconds, 1e-9)
        if rate > best.tokens_per_second:
            best.tokens_per_second, kept = rate, len(taken)
    for request in reversed(taken[kept:]):
        batch.remove_drafted(
            request.lane,
            _held(request),
            request.dispatched,
            counts[request.id],
            is_masked=request.grammar != "",
        )
        counts[request.id] -= 1
    best.drafts = {request.id: request.draft[: counts[request.id]] for request in taken[:kept]}
    return best


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
