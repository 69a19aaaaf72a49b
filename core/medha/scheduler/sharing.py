"""Prompts that requests share: which request computes them, which wait for it, and what each of these still needs.

Requests may name the same prompt (the samples of one request), or prompts that begin alike (`prefix_followers`).
Whenever a prefill begins, progresses or ends, the needs of the requests that wait for it change: the free KV blocks
that they need, their remaining work, and whether they must wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from medha.cost.predictor import Predictor
from medha.cost.prefill_seconds import Alone
from medha.scheduler.admission import Admission
from medha.scheduler.prefix_followers import PrefixFollowers
from medha.scheduler.request import Prompt, Request
from medha.scheduler.request_table import RequestTable


class Sharing:
    """The prompts of all requests, and what their waiting requests may share."""

    def __init__(
        self,
        table: RequestTable,
        admission: Admission,
        predictor: Predictor,
        block_size_tokens: int,
        *,
        frees_windows: bool = False,
    ) -> None:
        """`frees_windows`: ranks free KV before the windows of layers (`medha.kv.window_tables`)."""
        self.prompts: dict[str, Prompt] = {}
        self.forgets: dict[str, None] = {}  # prompts that ranks no longer need; sent with the next step
        self._table = table
        self._admission = admission
        self._predictor = predictor
        self._followers_of_prefixes = PrefixFollowers(block_size_tokens, table)
        self._awaited: dict[str, Prompt] = {}  # prompts that are being computed and have waiting requests
        self._frees_windows = frees_windows
        self._shared: dict[str, Prompt] = {}  # prompts that can be forked only until windows are freed

    def prompt_of(self, name: str, tokens: int) -> Prompt:
        """Return the prompt of an arriving request, which the ranks must keep from now on."""
        prompt = self.prompts.setdefault(name, Prompt(name, tokens))
        prompt.users += 1
        self.forgets.pop(name, None)  # not sent yet: the ranks still have the prompt
        return prompt

    # --- life of a request ----------------------------------------------------------------------------

    def arrive(self, request: Request, work_seconds: float, left: Alone) -> None:
        """Add a request to the table; `left` is the uncorrected work that no cache saves it."""
        prompt = request.prompt
        prompt.waiting[request.id] = request
        self._followers_of_prefixes.wait(request)
        wanted = self._admission.needed_blocks(request)
        self._table.add(request, work_seconds, left, self._busy_until(request, left), wanted)
        if _is_held(request):
            self.update(request)
        if prompt.users > 1:
            self._share(prompt, newcomer=request)

    def enter(self, request: Request) -> None:
        """Record that a waiting request got KV."""
        prompt = request.prompt
        del prompt.waiting[request.id]
        prompt.holders[request.id] = request
        self._share(prompt)
        self._update_all(self._followers_of_prefixes.enter(request))

    def computed(self, request: Request) -> None:
        """Record a computed chunk: others may find it cached, and fork the prompt once it is complete."""
        ready = self._followers_of_prefixes.computed(request)
        is_whole = request.computed >= request.prompt.tokens
        if is_whole:
            self._share(request.prompt)
        if is_whole or request.stalls:
            ready += self._followers_of_prefixes.ended(request)
        self._update_all(ready)

    def stop(self, request: Request) -> None:
        """Record that a running request gets no more steps."""
        self._share(request.prompt)
        self._update_all(self._followers_of_prefixes.ended(request))

    def leave(self, request: Request) -> None:
        """Forget a request that has left the table."""
        if request.waits:
            self._followers_of_prefixes.remove(request)
        prompt = request.prompt
        prompt.users -= 1
        prompt.waiting.pop(request.id, None)
        prompt.holders.pop(request.id, None)
        if prompt.users == 0:
            del self.prompts[prompt.name]
            self._awaited.pop(prompt.name, None)
            self._shared.pop(prompt.name, None)
            self.forgets[prompt.name] = None

    def end_forks(self) -> None:
        """Let no request fork a prompt whose last window is freed, because positions after it are in the pipeline."""
        for prompt in tuple(self._shared.values()):
            self._share(prompt)

    def leave_demoted(self) -> None:
        """Let no request wait for a demoted prefill that is now due after the request's own deadline.

        For a prefill of the same prompt, this holds only if the request's deadline is later than the prefill's.
        """
        self._update_all(self._followers_of_prefixes.leave_demoted())
        for prompt in self._awaited.values():
            holders = [holder for holder in prompt.holders.values() if not holder.ended]
            due = min((self._table.prefill_due(holder) for holder in holders), default=inf)
            latest = max((holder.deadline for holder in holders), default=-inf)
            for request in prompt.waiting.values():
                alone = due > request.deadline > latest
                if alone != request.is_detached:
                    request.is_detached = alone
                    self._needs(request, 0 if alone else prompt.tokens - 1)

    def _share(self, prompt: Prompt, newcomer: Request | None = None) -> None:
        """Let waiting requests share a computed prefill of their prompt, or wait for a running one.

        A running one may yet fail, and only computed KV can be shared.
        """
        if not prompt.waiting:
            self._awaited.pop(prompt.name, None)
            self._shared.pop(prompt.name, None)
            return
        holders = [holder for holder in prompt.holders.values() if not holder.ended]
        frees_windows = self._frees_windows
        sharing = next((holder for holder in holders if _can_be_forked(holder, prompt, frees_windows)), None)
        prefilling = sharing is None and any(
            holder.computed < prompt.tokens and not holder.streams for holder in holders
        )
        if frees_windows and sharing is not None:
            self._shared[prompt.name] = prompt
        else:
            self._shared.pop(prompt.name, None)
        changed = (prompt.sharing, prompt.prefilling) != (sharing, prefilling)
        prompt.sharing, prompt.prefilling = sharing, prefilling
        if prefilling:
            self._awaited[prompt.name] = prompt
        else:
            self._awaited.pop(prompt.name, None)
        for request in prompt.waiting.values() if changed else (newcomer,) if newcomer else ():
            if frees_windows and sharing is None and not prefilling:
                self.update(request)  # it may find cached what it can no longer fork
            else:
                self._needs(request, prompt.tokens - 1 if sharing is not None or prefilling else 0)

    # --- what a waiting request needs -----------------------------------------------------------------

    def update(self, request: Request) -> None:
        """Update the needs of a waiting request: more or less of its prompt is cached, or about to be."""
        prompt, hashes = request.prompt, request.submit.block_hashes
        there = prompt.tokens - 1
        if prompt.sharing is None:
            cached, _ = self._admission.pools.expected(prompt.tokens, hashes, is_long=request.may_spread)
            request.cached_tokens = cached
            there = min(max(cached, self._followers_of_prefixes.awaited_tokens(request)), there)
        self._needs(request, there)

    def _update_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.update(request)

    def _needs(self, request: Request, there_tokens: int) -> None:
        """Set what a waiting request needs if the KV of `there_tokens` tokens exists, or will exist."""
        left = self._predictor.uncorrected_prefill(there_tokens, request.prompt.tokens)
        wanted = self._admission.needed_blocks(request)
        self._table.needs(request, wanted, left, self._busy_until(request, left), held=_is_held(request))

    def _busy_until(self, request: Request, left: Alone) -> float:
        """Return when the last chunk must leave a stage to be out of the pipeline by the deadline."""
        return request.deadline - left.drain_seconds * self._predictor.correction.prefill


def _can_be_forked(holder: Request, prompt: Prompt, frees_windows: bool) -> bool:
    """Return whether a running request holds KV of the whole prompt that can be shared; streamed KV cannot.

    Ranks that free KV before windows keep the window of the prompt's last position until they plan a step after it.
    """
    if holder.streams:
        return False
    return holder.computed >= prompt.tokens and not (frees_windows and holder.dispatched > prompt.tokens)


def _is_held(request: Request) -> bool:
    """Return whether a request must wait, because another one computes its prompt, or the beginning of it."""
    if request.prompt.prefilling and not request.is_detached:
        return True
    return request.leader is not None and request.prompt.sharing is None
