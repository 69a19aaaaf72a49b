"""A client request while it runs: sequences out, pieces of text back, times measured."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from hashlib import blake2b

from medha.routing.router_core import Arrive, Deliver, Fail, NewSequence
from medha.wire.messages import ServiceClassTerms, TokenLogprob
from medha_router.api_error import ApiError
from medha_router.detokenize import StopStrings, TextStream
from medha_router.prepare import Plan, Prepared
from medha_router.replica_link import ReplicaLink
from medha_router.router_metrics import Observer
from medha_router.tokenizer_bundle import Bundle


@dataclass(frozen=True)
class ShownToken:
    """A token of the output with its log-probability; `offset` counts characters of the output before it."""

    token: int
    logprob: TokenLogprob
    offset: int


@dataclass
class Piece:
    """New output of choice `index`; the piece with a finish reason is its last."""

    index: int
    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class TokenTimes:
    """Times of one sequence's output tokens, in seconds of the loop's clock."""

    first: float
    last: float

    def per_token_seconds(self, output_tokens: int) -> float | None:
        """Return the mean time per output token after the first; None before the second."""
        return None if output_tokens < 2 else (self.last - self.first) / (output_tokens - 1)


class ChoiceOutput:
    """Turns the tokens of one choice into text, up to a stop string."""

    def __init__(self, index: int, plan: Plan, bundle: Bundle) -> None:
        self.index = index
        self.output_tokens = 0
        self.finished = False
        self._plan = plan
        self._bundle = bundle
        self._stream = TextStream()
        self._stops = StopStrings(plan.stop, include=plan.include_stop)
        self._decoded_characters = 0
        self._shown_characters = 0
        self._pending: list[ShownToken] = []  # tokens whose text is still held back

    def feed(self, delivered: Deliver) -> Piece | None:
        """Return what can be shown now; None if everything is held back."""
        piece = Piece(self.index)
        for position, token in enumerate(delivered.tokens):
            self.output_tokens += 1
            ends_here = delivered.finish_reason == "stop" and position == len(delivered.tokens) - 1
            if ends_here:
                break  # a stop token is counted, not shown
            if delivered.logprobs:
                self._pending.append(
                    ShownToken(token, delivered.logprobs[position], self._decoded_characters)
                )
            hidden = self._plan.skip_special_tokens and token in self._bundle.special_ids
            text = "" if hidden else self._stream.feed(self._bundle.token_bytes.get(token, b""))
            if self._show(piece, text):
                return self._finish(piece, "stop")
        if delivered.finish_reason is not None:
            if self._show(piece, self._stream.end()):
                return self._finish(piece, "stop")
            piece.text += self._stops.end()
            return self._finish(piece, delivered.finish_reason)
        if not piece.text:
            return None
        self._shown_characters += len(piece.text)
        piece.tokens = [shown for shown in self._pending if shown.offset < self._shown_characters]
        self._pending = self._pending[len(piece.tokens) :]
        return piece

    def _show(self, piece: Piece, text: str) -> bool:
        """Add the part of `text` that may be shown; return whether a stop string ended the choice."""
        self._decoded_characters += len(text)
        # As in vLLM, a stop string counts if it ends after `min_tokens`, wherever it begins.
        may_end = self.output_tokens > self._plan.sampling.min_tokens
        shown, stopped = self._stops.feed(text, may_end=may_end)
        piece.text += shown
        return stopped

    def _finish(self, piece: Piece, reason: str) -> Piece:
        self.finished = True
        self._shown_characters += len(piece.text)
        by_stop_string = reason == "stop" and self._shown_characters < self._decoded_characters
        piece.tokens = [
            shown for shown in self._pending if not by_stop_string or shown.offset < self._shown_characters
        ]
        self._pending = []
        piece.finish_reason = reason
        return piece


def prompt_seed(seed: int, prompt_index: int) -> int:
    """Return the seed of a request's prompt number `prompt_index`, derived from the request's own seed.

    Sampling is keyed by seed, sample and position, so prompts with the same seed would share their random
    numbers. The first prompt keeps the request's seed: it gets the same samples alone and in a list. The
    result is below 2**63, as `seed` is.
    """
    if prompt_index == 0:
        return seed
    key = f"{seed}/{prompt_index}".encode()
    return int.from_bytes(blake2b(key, digest_size=8, person=b"medha seed").digest()) >> 1


class Generation:
    """The sequences of one client request. Iterate over `pieces`, then `close`; both exactly once."""

    def __init__(
        self,
        request_id: str,
        prepared: Prepared,
        terms: ServiceClassTerms,
        ttft_target_seconds: float | None,
        tpot_target_seconds: float | None,
        link: ReplicaLink,
        bundle: Bundle,
        observer: Observer,
        arrived_at: float,
    ) -> None:
        """Submit the sequences.

        `arrived_at` is of the loop's clock; targets are the client's own, None where it gave none.
        """
        plan = prepared.plan
        assert plan is not None
        self.plan = plan
        self.terms = terms
        self._prompt_lengths = [len(prompt) for prompt in prepared.prompts]
        self.prompt_tokens = sum(self._prompt_lengths)
        self._longest_prompt = max(self._prompt_lengths)
        self.tpot_target_seconds = (
            terms.tpot_target_seconds if tpot_target_seconds is None else tpot_target_seconds
        )
        self._link = link
        self._observer = observer
        self._arrived_at = arrived_at
        self._first_token_at: float | None = None
        self._outcome: str | None = None
        self._is_our_failure = False

        seed = plan.seed % 2**63 if plan.seed is not None else secrets.randbits(63)
        sequences = []
        prompts = {}
        self._choices: dict[str, ChoiceOutput] = {}
        self._cached_tokens: dict[int, int] = {}  # by prompt
        self._token_times: dict[str, TokenTimes] = {}  # by sequence, from its first token on
        self._slowest_per_token_seconds: float | None = None
        for prompt_index, ids in enumerate(prepared.prompts):
            prompt = f"{request_id}/{prompt_index}"
            prompts[prompt] = ids
            own_seed = prompt_seed(seed, prompt_index)
            for sample in range(plan.samples):
                index = prompt_index * plan.samples + sample
                name = f"{request_id}-{index}"
                sequences.append(NewSequence(name, prompt, len(ids), own_seed, plan.sampling, sample))
                self._choices[name] = ChoiceOutput(index, plan, bundle)
        self._arrive = Arrive(
            plan.model,
            plan.digest,
            tuple(sequences),
            terms.name,
            ttft_target_seconds,
            tpot_target_seconds,
            plan.cache_salt,
        )
        self._ttft_target = link.core.ttft_target_seconds(self._arrive, self._longest_prompt)
        observer.accepted(plan.model, self.prompt_tokens)
        self._outcomes = link.submit(self._arrive, prompts)

    @property
    def outcome(self) -> str | None:
        """The outcome: `stop`, `length`, `cancelled` or the code of an error; None while it runs."""
        return self._outcome

    @property
    def ttft_seconds(self) -> float | None:
        """Seconds from arrival to the first token; None before that."""
        return None if self._first_token_at is None else self._first_token_at - self._arrived_at

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self._choices.values())

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose KV was cached; a prompt of several samples counts once."""
        return sum(self._cached_tokens.values())

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield new output until all choices are finished.

        Raises:
            ApiError: the request failed; nothing follows.
        """
        open_choices = len(self._choices)
        reason = ""
        while open_choices:
            outcome = await self._outcomes.get()
            if isinstance(outcome, Fail):
                error = ApiError.from_fail(outcome)
                self._outcome = error.code or "internal_error"
                self._is_our_failure = error.is_ours
                raise error
            choice = self._choices[outcome.id]
            if choice.finished:
                continue
            if outcome.tokens:
                self._observe_tokens(outcome.id)
            if outcome.tokens:
                self._observe_cached(choice.index // self.plan.samples, outcome.cached_tokens)
            before = choice.output_tokens
            piece = choice.feed(outcome)
            self._observer.output(self.plan.model, choice.output_tokens - before)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                open_choices -= 1
                reason = piece.finish_reason
                if outcome.finish_reason is None:
                    self._link.abandon(outcome.id)  # a stop string ended it: the replica does not know
                self._observe_sequence(outcome.id, reason)
            yield piece
        self._outcome = reason
        self._observe_request()

    def _observe_cached(self, prompt_index: int, cached_tokens: int) -> None:
        """Count how much of a prompt was cached, as reported with the first token of its first sample to get one."""
        if prompt_index not in self._cached_tokens:
            self._cached_tokens[prompt_index] = cached_tokens
            self._observer.prompt_cached(self.plan.model, self._prompt_lengths[prompt_index], cached_tokens)

    def _observe_tokens(self, sequence_id: str) -> None:
        now = asyncio.get_running_loop().time()
        model, service_class = self.plan.model, self.terms.name
        if self._first_token_at is None:
            self._first_token_at = now
            seconds = now - self._arrived_at
            self._observer.first_token(model, service_class, self._longest_prompt, seconds, self._ttft_target)
        times = self._token_times.get(sequence_id)
        if times is None:
            self._token_times[sequence_id] = TokenTimes(now, now)
            return
        self._observer.between_tokens(model, service_class, now - times.last)
        times.last = now

    def _observe_sequence(self, sequence_id: str, reason: str) -> None:
        model, service_class = self.plan.model, self.terms.name
        self._observer.sequence_finished(model, reason)
        times = self._token_times.get(sequence_id)
        if times is None:
            return
        seconds = times.per_token_seconds(self._choices[sequence_id].output_tokens)
        if seconds is not None:
            self._observer.per_token(model, service_class, seconds)
            self._slowest_per_token_seconds = max(seconds, self._slowest_per_token_seconds or 0.0)

    def _observe_request(self) -> None:
        now = asyncio.get_running_loop().time()
        model, service_class = self.plan.model, self.terms.name
        self._observer.request_finished(model, service_class, now - self._arrived_at)
        slowest = self._slowest_per_token_seconds
        if slowest is not None:
            met = slowest <= self.tpot_target_seconds
            self._observer.tpot_attained(model, service_class, self._longest_prompt, met)

    def close(self) -> None:
        """Free everything and cancel what still runs."""
        self._link.release(self._arrive)
        if self._outcome is None:
            self._outcome = "cancelled"
        if self._is_our_failure:  # a failure of ours counts as a miss of the next target
            broken = (
                self._observer.ttft_attained if self._first_token_at is None else self._observer.tpot_attained
            )
            broken(self.plan.model, self.terms.name, self._longest_prompt, False)
        self._observer.request_ended(self.plan.model, self.plan.endpoint, self._outcome)
