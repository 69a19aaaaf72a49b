"""Status of a controller process across epochs: the status of its core, rates, and attained targets."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from medha.api.replica_role import ReplicaRole
from medha.scheduler.controller import ReplicaController
from medha.scheduler.history import Facts, History
from medha.scheduler.status_report import AttainmentStatus, Order, ReplicaStatus, TierRates, status
from medha.scheduler.tier_report import Direction, Tier, copied_bytes, tiers_of

WINDOW_SECONDS = 10.0
"""Window over which rates are averaged; shorter while the process has not run that long."""
_BUCKET_SECONDS = 0.5


@dataclass(slots=True)
class _Bucket:
    """Work that was completed within one interval of `_BUCKET_SECONDS`."""

    begins: float
    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    copied_bytes: Counter[tuple[Tier, Direction]] = field(default_factory=Counter)


class LiveStatus:
    """Adds up the facts of one controller process, and reports its status."""

    def __init__(self, replica: str, model: str, role: ReplicaRole = "both") -> None:
        self._replica, self._model, self._role = replica, model, role
        self._began: float | None = None  # when the first epoch began
        self._history = History()  # of the current epoch
        self._buckets: deque[_Bucket] = deque()
        self._copied: dict[tuple[Tier, Direction], int] = {}  # since the epoch began, up to the last event
        self._attained = Counter[tuple[str, str, bool]]()  # (class, ttft | tpot, met)

    def begin_epoch(self, history: History, now: float) -> None:
        """Continue with the history of a fresh core."""
        self._began = now if self._began is None else self._began
        self._history = history
        self._copied = {}

    def observe(self, facts: Facts, core: ReplicaController) -> None:
        """Add the facts of one event; `core` is the state after it."""
        if facts.completed is not None:
            bucket = self._bucket(facts.now)
            bucket.steps += 1
            bucket.prefill_tokens += facts.completed.launched.prefill_tokens
        copied = copied_bytes(core)
        if copied != self._copied:
            grown = {key: total - self._copied.get(key, 0) for key, total in copied.items()}
            self._bucket(facts.now).copied_bytes.update(grown)
            self._copied = copied
        if self._buckets:  # the last one, to which the step that produced the tokens was added
            self._buckets[-1].decode_tokens += facts.later_tokens
        for request in facts.first_tokens:
            self._attained[request.service_class, "ttft", request.ttft_met] += 1
        for ended in facts.ended:
            if ended.request is not None and ended.tpot_met is not None:
                self._attained[ended.request.service_class, "tpot", ended.tpot_met] += 1

    def _bucket(self, now: float) -> _Bucket:
        """Return the bucket for work that is completed now."""
        if not self._buckets or now - self._buckets[-1].begins >= _BUCKET_SECONDS:
            self._buckets.append(_Bucket(now))
            self._forget(now)
        return self._buckets[-1]

    def _forget(self, now: float) -> None:
        while self._buckets and now - self._buckets[0].begins > WINDOW_SECONDS:
            self._buckets.popleft()

    def status(
        self,
        core: ReplicaController | None,
        now: float,
        *,
        missing_ranks: Sequence[int] = (),
        order: Order = "urgency",
        most_requests: int = 50,
    ) -> ReplicaStatus:
        """Return the status at `now`; `core` is None while the ranks gather."""
        self._forget(now)
        up_seconds = 0.0 if self._began is None else now - self._began
        window = min(WINDOW_SECONDS, max(up_seconds, _BUCKET_SECONDS))
        state = "gathering" if core is None else "draining" if core.draining else "serving"
        return ReplicaStatus(
            replica=self._replica,
            model=self._model,
            role=self._role,
            state=state,  # type: ignore[arg-type] # one of the three
            missing_ranks=tuple(missing_ranks) if core is None else (),
            up_seconds=up_seconds,
            window_seconds=window,
            prefill_tokens_per_second=sum(bucket.prefill_tokens for bucket in self._buckets) / window,
            decode_tokens_per_second=sum(bucket.decode_tokens for bucket in self._buckets) / window,
            steps_per_second=sum(bucket.steps for bucket in self._buckets) / window,
            attainment=tuple(
                AttainmentStatus(
                    service_class=name,
                    ttft_met=self._attained[name, "ttft", True],
                    ttft_missed=self._attained[name, "ttft", False],
                    tpot_met=self._attained[name, "tpot", True],
                    tpot_missed=self._attained[name, "tpot", False],
                )
                for name in sorted({name for name, _, _ in self._attained})
            ),
            tier_rates=() if core is None else self._tier_rates(core, window),
            core=None
            if core is None
            else status(core, self._history, now, order=order, most_requests=most_requests),
        )

    def _tier_rates(self, core: ReplicaController, window_seconds: float) -> tuple[TierRates, ...]:
        copied = Counter[tuple[Tier, Direction]]()
        for bucket in self._buckets:
            copied.update(bucket.copied_bytes)
        return tuple(
            TierRates(
                tier=tier,
                read_bytes_per_second=copied[tier, "read"] / window_seconds,
                written_bytes_per_second=copied[tier, "written"] / window_seconds,
            )
            for tier in tiers_of(core)
        )
