"""What goes into the next step: all runnable decodes, then prefill chunks under a time budget.

Paper B, algorithms 1 and 2, mended as DESIGN §5 says:

* the *whole batch* is predicted for each candidate chunk, because the time of a step is not additive;
* a prefill that does not fit is set aside for this step, never requeued into the same loop;
* only long requests yield space, only while another prefill is runnable, and what nobody used is given back;
* at most one long prefill runs per lane and step;
* the most urgent prefill always gets its smallest efficient chunk, so that no flood of decodes starves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from medha.predictor import Predictor, Work


@dataclass(frozen=True, slots=True)
class DecodeCandidate:
    id: str
    context: int  # tokens of KV before the one that it computes
    tpot_seconds: float


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    id: str
    context: int  # positions already dispatched
    remaining: int  # positions still to dispatch
    is_long: bool
    relative_slack: float  # rho, for space sharing


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one step; tokens count all sequences together."""

    stages: int
    max_chunk_tokens: int
    min_chunk_tokens: int
    max_step_seconds: float
    min_prefill_share: float
    space_sharing_cap: float


@dataclass(slots=True)
class Packed:
    """A step: tokens per sequence, decodes first, and why it is as large as it is (seconds)."""

    tokens: dict[str, int] = field(default_factory=dict)
    predicted_seconds: float = 0.0
    budget_seconds: float = 0.0
    decode_overrun: bool = False  # decodes alone take longer than their tightest TPOT target


def pack(
    decodes: Sequence[DecodeCandidate],
    prefills: Sequence[PrefillCandidate],
    limits: Limits,
    predictor: Predictor,
) -> Packed:
    """The next step. `prefills` are in the order of the policy, most urgent first."""
    works = {decode.id: Work(decode.context, 1) for decode in decodes}
    decode_seconds = predictor.step_seconds(works.values()) if works else 0.0
    packed = Packed(predicted_seconds=decode_seconds)
    if decodes:
        target = min(decode.tpot_seconds for decode in decodes) / limits.stages
        packed.decode_overrun = decode_seconds > target
        packed.budget_seconds = max(target, decode_seconds / (1 - limits.min_prefill_share))
    else:
        packed.budget_seconds = limits.max_step_seconds / limits.stages

    chunks = _Chunks(works, limits, predictor)
    yielding: list[PrefillCandidate] = []
    has_long = False
    for prefill in prefills:
        if prefill.is_long and has_long:
            continue
        budget = packed.budget_seconds
        if prefill.is_long and len(prefills) > 1:
            budget *= 1 - min(max(prefill.relative_slack, 0.0), limits.space_sharing_cap)
            yielding.append(prefill)
        most_urgent = prefill is prefills[0]
        if chunks.add(prefill, budget, at_least_one=most_urgent) and prefill.is_long:
            has_long = True
    for prefill in yielding:  # second pass: what the others left
        if prefill.id in works or not has_long:
            has_long = chunks.add(prefill, packed.budget_seconds, at_least_one=False) or has_long
    packed.tokens = {sequence: work.count for sequence, work in works.items()}
    if works:
        packed.predicted_seconds = predictor.step_seconds(works.values())
    return packed


class _Chunks:
    """Adds prefill chunks to the works of a step, each as large as its budget allows."""

    def __init__(self, works: dict[str, Work], limits: Limits, predictor: Predictor) -> None:
        self.works = works
        self.limits = limits
        self.predictor = predictor
        self.tokens_left = limits.max_chunk_tokens

    def add(self, prefill: PrefillCandidate, budget_seconds: float, *, at_least_one: bool) -> bool:
        """Give `prefill` the largest chunk that fits, or enlarge the one that it has; False if it has none."""
        before = self.works.pop(prefill.id, None)
        held = before.count if before else 0
        most = min(prefill.remaining, self.tokens_left + held)
        least = min(self.limits.min_chunk_tokens, prefill.remaining)
        size = self._largest(prefill, most, budget_seconds)
        if size < least:
            size = min(least, most) if at_least_one else 0
        size = max(size, held)
        if size == 0:
            return False
        self.works[prefill.id] = Work(prefill.context, size)
        self.tokens_left -= size - held
        return True

    def _largest(self, prefill: PrefillCandidate, most: int, budget_seconds: float) -> int:
        """Binary search of the largest chunk for which the whole batch is predicted to end in time."""

        def fits(count: int) -> bool:
            batch = [*self.works.values(), Work(prefill.context, count)]
            return self.predictor.step_seconds(batch) <= budget_seconds

        if most <= 0:
            return 0
        if fits(most):
            return most
        low, high = 0, most  # fits at low (a chunk of none), not at high
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low
