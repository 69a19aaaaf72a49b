"""The requests of a replica: which ones wait or run, and what requests with the same prompt can share."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from medha.cost.predictor import Predictor
from medha.cost.prefill_seconds import Alone
from medha.scheduler import validation
from medha.scheduler.admission import Admission
from medha.scheduler.alike import Alike
from medha.scheduler.candidates import Candidates
from medha.scheduler.config import ReplicaConfig
from medha.scheduler.request import Prompt, Request
from medha.slo import targets
from medha.wire.messages import Submit


class Roster:
    """Requests by id, their prompts, and their rows in the table of prefills."""

    def __init__(
        self, config: ReplicaConfig, predictor: Predictor, admission: Admission, candidates: Candidates
    ) -> None:
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}  # requests that hold KV, in the order of admission
        self.prompts: dict[str, Prompt] = {}
        self.forgets: dict[str, None] = {}  # prompts that ranks no longer need; sent with the next step
        self._config = config
        self._max_running = config.scheduling.max_running
        self._predictor = predictor
        self._admission = admission
        self._candidates = candidates
        self._alike = Alike(config.block_size_tokens, candidates.dispatched_by)
        self._awaited: dict[str, Prompt] = {}  # prompts that are being computed and have waiting requests
        self._arrivals = 0
        self._ended = 0  # running requests whose KV waits in quarantine
        # Share of running places that late requests get. Only `guarded` needs it: under other policies late
        # requests come first anyway, except under `srpt`, which guarantees nothing to large ones.
        share = config.scheduling.given_up_share if config.scheduling.policy == "guarded" else 0.0
        self._others_per_late = round(1 / share) - 1 if share else inf
        self._last_places = 0  # taken by others since a late request got one

    def find(self, request_id: str) -> Request | None:
        """Return the request with this id, if it is here."""
        return self.waiting.get(request_id) or self.running.get(request_id)

    @property
    def active(self) -> int:
        """Number of running requests that have not ended."""
        return len(self.running) - self._ended

    @property
    def is_full(self) -> bool:
        """True if no more requests may hold KV (`max_running`)."""
        return len(self.running) >= self._max_running

    @property
    def prefills(self) -> bool:
        """True if a prefill could take part in a step: one that holds KV or may get some."""
        waiting = len(self.waiting)
        return len(self._candidates) > waiting or (waiting > 0 and not self.is_full)

    @property
    def owes_place(self) -> bool:
        """True if the next running place is due to a late request, because others got the last ones.

        Places, and not only work, are shared by `given_up_share`.
        """
        return self._last_places >= self._others_per_late

    def refusal(self, submit: Submit) -> validation.Refusal | None:
        """Return why a request is refused, or None."""
        if self.find(submit.id) is not None:
            return "invalid", f"request {submit.id} is already here"
        prompt = self.prompts.get(submit.prompt)
        malformed = validation.malformed(submit, None if prompt is None else prompt.tokens)
        if malformed is not None:
            return "invalid", malformed
        unservable = validation.unservable(self._config, submit)
        if unservable is not None:
            return unservable
        if len(self.waiting) >= self._config.scheduling.max_waiting:
            return "capacity", f"{len(self.waiting)} requests already wait"
        return None

    # --- life of a request ----------------------------------------------------------------------------

    def arrive(self, submit: Submit, now: float) -> None:
        """Add an accepted request, which then waits for KV."""
        config = self._config
        prompt = self.prompts.setdefault(submit.prompt, Prompt(submit.prompt, submit.tokens))
        prompt.users += 1
        self.forgets.pop(submit.prompt, None)  # not sent yet: the ranks still have the prompt
        may_spread = validation.may_spread(config, submit)
        cached_tokens, _ = self._admission.pools.expected(
            submit.tokens, submit.block_hashes, is_long=may_spread
        )
        whole = left = self._predictor.uncorrected_prefill(0, submit.tokens)
        if cached_tokens:
            left = self._predictor.uncorrected_prefill(cached_tokens, submit.tokens)
        # The target follows from the whole prompt, whatever is cached: a cache must not tighten a deadline.
        work_seconds = whole.seconds * self._predictor.correction
        service_class = config.service_classes[validation.class_name(config, submit)]
        self._arrivals += 1
        request = Request(
            submit=submit,
            id=submit.id,
            prompt=prompt,
            tie=self._arrivals,
            arrival=now - submit.age_seconds,
            targets=targets(
                service_class, work_seconds, submit.deadline_after_seconds, submit.tpot_target_seconds
            ),
            work_seconds=work_seconds,
            is_long=submit.tokens - cached_tokens >= config.long_threshold_tokens,
            length=submit.tokens,
            limit_tokens=validation.limit_tokens(config, submit),
            reservation_tokens=validation.reservation_tokens(config, submit),
            may_spread=may_spread,
            cached_tokens=cached_tokens,
        )
        self.waiting[request.id] = request
        prompt.waiting[request.id] = request
        self._alike.wait(request)
        wanted = self._admission.wanted_blocks(request)
        self._candidates.add(request, left, self._busy_until(request, left), wanted)
        if request.is_held:
            self.look_again(request)
        if prompt.users > 1:
            self._share(prompt, newcomer=request)

    def enter(self, request: Request, *, late: bool = False) -> None:
        """Move a waiting request that got KV to the running ones; `late`: it was admitted as the claimant."""
        del self.waiting[request.id]
        self.running[request.id] = request
        self._last_places = 0 if late else self._last_places + self.is_full
        self._candidates.admitted(request)
        prompt = request.prompt
        del prompt.waiting[request.id]
        prompt.holders[request.id] = request
        self._share(prompt)
        for other in self._alike.enter(request):
            self.look_again(other)
        if request.cached_tokens:
            self.progressed([request])

    def progressed(self, requests: Iterable[Request]) -> None:
        """Update the remaining work of unfinished prefills with newly dispatched or cached positions."""
        for request in requests:
            left = self._predictor.uncorrected_prefill(request.dispatched, request.submit.tokens)
            self._candidates.progressed(request, left)

    def leave_given_up(self) -> None:
        """Let no request wait for a demoted prefill that is now due after the request's own deadline.

        For a prefill of the very same prompt, this holds only if the request's deadline is later than the
        prefill's.
        """
        for request in self._alike.leave_given_up():
            self.look_again(request)
        for prompt in self._awaited.values():
            holders = [holder for holder in prompt.holders.values() if not holder.ended]
            due = min((self._candidates.dispatched_by(holder) for holder in holders), default=inf)
            latest = max((holder.deadline for holder in holders), default=-inf)
            for request in prompt.waiting.values():
                alone = due > request.deadline > latest
                if alone != request.goes_alone:
                    request.goes_alone = alone
                    self._wants(request, 0 if alone else prompt.tokens - 1)

    def computed(self, request: Request) -> None:
        """Record a computed chunk: others may find it cached, and fork the prompt once it is complete."""
        ready = self._alike.computed(request)
        if request.computed >= request.prompt.tokens:
            self._share(request.prompt)
            ready += self._alike.ended(request)
        for other in ready:
            self.look_again(other)

    def stop(self, request: Request) -> None:
        """Record that a running request gets no more steps."""
        self._ended += 1
        self._candidates.remove([request])
        self._share(request.prompt)
        for other in self._alike.ended(request):
            self.look_again(other)

    def leave(self, request: Request) -> None:
        """Remove a request."""
        if self.waiting.pop(request.id, None) is not None:
            self._alike.remove(request)
            self._candidates.remove([request])
        if self.running.pop(request.id, None) is not None:
            self._ended -= 1
        prompt = request.prompt
        prompt.users -= 1
        prompt.waiting.pop(request.id, None)
        prompt.holders.pop(request.id, None)
        if prompt.users == 0:
            del self.prompts[prompt.name]
            self._awaited.pop(prompt.name, None)
            self.forgets[prompt.name] = None

    # --- sharing of prompts ---------------------------------------------------------------------------

    def _share(self, prompt: Prompt, newcomer: Request | None = None) -> None:
        """Let waiting requests share a computed prefill of their prompt, or wait for a running one.

        A running one may yet fail, and only computed KV can be shared.
        """
        if not prompt.waiting:
            self._awaited.pop(prompt.name, None)
            return
        holders = [holder for holder in prompt.holders.values() if not holder.ended]
        sharing = next((holder for holder in holders if holder.computed >= prompt.tokens), None)
        prefilling = bool(holders) and sharing is None
        changed = (prompt.sharing, prompt.prefilling) != (sharing, prefilling)
        prompt.sharing, prompt.prefilling = sharing, prefilling
        if prefilling:
            self._awaited[prompt.name] = prompt
        else:
            self._awaited.pop(prompt.name, None)
        for request in prompt.waiting.values() if changed else (newcomer,) if newcomer else ():
            self._wants(request, prompt.tokens - 1 if sharing is not None or prefilling else 0)

    def wants_the_same(self, request: Request) -> bool:
        """Return whether a waiting request still needs as many free blocks as was noted last."""
        return self._admission.wanted_blocks(request) == request.wanted_blocks

    def look_again(self, request: Request) -> None:
        """Recompute the needs of a waiting request: more or less of its prompt is cached, or about to be."""
        prompt, hashes = request.prompt, request.submit.block_hashes
        there = prompt.tokens - 1
        if prompt.sharing is None:
            cached, _ = self._admission.pools.expected(prompt.tokens, hashes, is_long=request.may_spread)
            request.cached_tokens = cached
            there = min(max(cached, self._alike.awaited_tokens(request)), there)
        self._wants(request, there)

    def _wants(self, request: Request, there_tokens: int) -> None:
        """Note what a waiting request needs if the KV of `there_tokens` tokens exists, or will exist."""
        left = self._predictor.uncorrected_prefill(there_tokens, request.prompt.tokens)
        wanted = self._admission.wanted_blocks(request)
        busy_until = self._busy_until(request, left)
        self._candidates.wants(request, wanted, left, busy_until, held=request.is_held)

    def _busy_until(self, request: Request, left: Alone) -> float:
        """Return when the last chunk must leave a stage to be out of the pipeline by the deadline."""
        return request.deadline - left.drain_seconds * self._predictor.correction
