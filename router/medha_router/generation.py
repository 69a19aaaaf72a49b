"""A client request while it runs: sequences out, pieces of text back, times measured."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from math import isfinite

from medha.observing.timeline import Began
from medha.routing.prefix_memory import Prefix
from medha.routing.router_events import Arrive, Deliver, Fail, NewSequence
from medha.wire.frames import TokenIds
from medha.wire.messages import PromptLogprobs, ServiceClassTerms, TokenLogprob
from medha_router.api_error import ApiError
from medha_router.channels import Channels, Mark, ThoughtBytes
from medha_router.detokenize import StopStrings, TextStream
from medha_router.key_accounts import Account
from medha_router.outcome_queue import MOST_WAITING_TOKENS, Unread
from medha_router.prepare import PROMPT_FIELDS, Plan, Prepared
from medha_router.replica_link import ReplicaLink
from medha_router.router_metrics import Observer
from medha_router.thought_text import Phase, Thought
from medha_router.tokenizer_bundle import Bundle
from medha_router.tool_call_text import CallPart
from medha_router.tool_formats import FORMATS
from medha_router.tool_use import reader_of


@dataclass(frozen=True)
class ShownToken:
    """A token of the output with its log-probability; `offset` counts characters of the output before it."""

    token: int
    logprob: TokenLogprob
    offset: int


OutputPart = str | CallPart | Thought


@dataclass
class Piece:
    """New output of choice `index`; the piece with a finish reason is its last.

    `parts` has text, thoughts and calls in their order.
    """

    index: int
    parts: list[OutputPart] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None
    ends_with_calls: bool = False
    """The output has ended with whole calls of functions."""
    has_thoughts: bool = False
    """The whole output has thoughts, whether or not they are among the parts."""

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def thoughts(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    def add(self, part: OutputPart) -> None:
        """Add a part; neighbours of one kind are joined, except those of calls."""
        last = self.parts[-1] if self.parts else None
        if isinstance(part, str) and isinstance(last, str):
            self.parts[-1] = last + part
        elif isinstance(part, Thought) and isinstance(last, Thought):
            self.parts[-1] = Thought(last.text + part.text)
        elif part != "":
            self.parts.append(part)


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt's token ids, int32 [n], and the log-probabilities of all but the first."""

    ids: TokenIds
    scores: PromptLogprobs

    def tokens(self) -> Iterator[tuple[int, TokenLogprob, int]]:
        """Yield (token, log-probabilities, rank) of every token but the first."""
        scores, width = self.scores, self.scores.alternatives
        for index, (token, logprob) in enumerate(zip(self.ids[1:].tolist(), scores.logprobs, strict=True)):
            places = slice(index * width, (index + 1) * width)
            top = tuple(zip(scores.top_ids[places], scores.top_logprobs[places], strict=True))
            yield token, TokenLogprob(logprob, top), scores.ranks[index]


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
        self.thought_tokens = 0
        """Output tokens of the thoughts; the marks around them count if they are text."""
        self.finished = False
        self._plan = plan
        self._bundle = bundle
        self._stream = TextStream()
        self._stops = StopStrings(plan.stop, include=plan.include_stop)
        self._decoded_characters = 0
        self._shown_characters = 0
        self._pending: list[ShownToken] = []  # tokens whose text is still held back
        self._hidden_ids = bundle.special_ids if plan.skip_special_tokens else frozenset[int]()
        self._calls = None
        form = None if plan.tools is None else FORMATS[plan.tools.format]
        in_channels = form is not None and form.in_channels
        if plan.tools is not None and form is not None:
            self._calls = reader_of(plan.tools)
            if not in_channels:
                self._hidden_ids -= set(bundle.special_ids_of(form.marks).values())
        marks = bundle.marks_to_read(plan.endpoint, skip_special_tokens=plan.skip_special_tokens)
        self._channels = Channels(marks, with_calls=in_channels) if marks else None
        self._thought_stream = TextStream()  # of those in channels
        self._thoughts = None if plan.thoughts is None else plan.thoughts.reader
        self._shows_thoughts = plan.thoughts is not None and plan.thoughts.place == "apart"
        self._has_thoughts = False
        self._undecided: list[ShownToken] = []  # tokens that may be of the answer
        self._undecided_tokens = 0
        # The marks are read; where thoughts stay in the content, they are shown.
        if plan.thoughts is not None:
            self._hidden_ids -= set(plan.thoughts.special_ids(bundle).values())

    def feed(self, delivered: Deliver) -> Piece | None:
        """Return what can be shown now; None if everything is held back."""
        piece = Piece(self.index)
        if self._plan.computes_only:
            return self._finish(piece, "length")
        for position, token in enumerate(delivered.tokens):
            self.output_tokens += 1
            ends_here = delivered.finish_reason == "stop" and position == len(delivered.tokens) - 1
            spelled = self._bundle.token_bytes.get(token, b"")
            found = spelled if self._channels is None else self._channels.feed(token, spelled)
            if found is None:
                continue
            if isinstance(found, Mark):
                if self._pass(piece, found):
                    return self._finish(piece, "stop")
                continue
            hidden = token in self._hidden_ids
            if isinstance(found, ThoughtBytes):
                if not ends_here:  # a stop token is no thought
                    self.thought_tokens += 1
                    shown = found.removesuffix(spelled) if hidden else found
                    self._think(piece, self._thought_stream.feed(shown))
                continue
            scored = None
            if delivered.logprobs and (not ends_here or self._plan.echo_logprobs):
                scored = ShownToken(token, delivered.logprobs[position], self._decoded_characters)
            if ends_here:
                self._pending += [] if scored is None else [scored]
                break  # a stop token is counted, not shown; beside an echo it is listed, as clients count from the end
            text = self._without_thoughts(piece, "" if hidden else self._stream.feed(found), scored)
            if self._show(piece, text) or (self._calls is not None and self._calls.is_done):
                return self._finish(piece, "stop")
        if delivered.finish_reason is not None:
            if self._show(piece, self._last_text(piece)):
                return self._finish(piece, "stop")
            self._add(piece, self._stops.end())
            return self._finish(piece, delivered.finish_reason)
        piece.tokens = [shown for shown in self._pending if shown.offset < self._shown_characters]
        self._pending = self._pending[len(piece.tokens) :]
        return piece if piece.parts or piece.tokens else None

    def _think(self, piece: Piece, text: str) -> None:
        if text:
            self._has_thoughts = True
            if self._shows_thoughts:
                piece.add(Thought(text))

    def _without_thoughts(self, piece: Piece, text: str, scored: ShownToken | None) -> str:
        """Add the thoughts in a token's text to the piece, and return the rest, which is of the answer.

        `scored` is the token with its log-probabilities, if it is to be shown when it is of the answer.
        """
        if self._thoughts is None:
            self._pending += [] if scored is None else [scored]
            return text
        before, held = self._thoughts.phase, self._thoughts.held_characters
        answer = self._add_thoughts(piece, self._thoughts.feed(text))
        phase = self._thoughts.phase
        if before.is_in_thoughts or phase.is_in_thoughts or (before is not phase and phase is Phase.AFTER):
            self.thought_tokens += 1 + self._undecided_tokens
            self._undecided_tokens = 0
        if phase is Phase.UNDECIDED:
            self._undecided_tokens += 1
            self._undecided += [] if scored is None else [replace(scored, offset=held)]
        elif phase is Phase.ANSWER:
            if scored is not None and before is Phase.UNDECIDED:
                scored = replace(scored, offset=held)
            self._pending += self._undecided + ([] if scored is None else [scored])
            self._undecided, self._undecided_tokens = [], 0
        elif phase is Phase.AFTER and not text:  # it may begin a character of the answer
            self._undecided += [] if scored is None else [scored]
        else:
            self._undecided = []
        return answer

    def _last_text(self, piece: Piece) -> str:
        """Return text of the answer that was held back as a part of a character, of a header or of a mark."""
        text = self._stream.feed(b"" if self._channels is None else self._channels.end()) + self._stream.end()
        self._think(piece, self._thought_stream.end())
        if self._thoughts is None:
            return text
        found = self._add_thoughts(piece, self._thoughts.feed(text))
        found += self._add_thoughts(piece, self._thoughts.end())
        if self._thoughts.phase in (Phase.UNDECIDED, Phase.ANSWER):
            self._pending += self._undecided
        return found

    def _add_thoughts(self, piece: Piece, parts: list[Thought | str]) -> str:
        """Add thoughts, and return the text of the answer."""
        for part in parts:
            if isinstance(part, Thought):
                self._think(piece, part.text)
        return "".join(part for part in parts if isinstance(part, str))

    def _show(self, piece: Piece, text: str) -> bool:
        """Add the part of `text` that may be shown; return whether a stop string ended the choice."""
        self._decoded_characters += len(text)
        # As in vLLM, a stop string counts if it ends after `min_tokens`, wherever it begins.
        may_end = self.output_tokens > self._plan.sampling.min_tokens
        shown, stopped = self._stops.feed(text, may_end=may_end)
        self._add(piece, shown)
        return stopped

    def _pass(self, piece: Piece, mark: Mark) -> bool:
        """Pass the mark of a call, which no stop string spans; return whether it ends the choice."""
        stopped = self._show(piece, self._stream.end())
        if stopped or self._calls is None:
            return stopped
        self._add(piece, self._stops.end())
        self._add_parts(piece, self._calls.feed([mark]))
        return self._calls.is_done

    def _add(self, piece: Piece, text: str) -> None:
        """Add text of the output, from which calls are taken."""
        self._shown_characters += len(text)
        if self._calls is None:
            piece.add(text)
        elif text:
            self._add_parts(piece, self._calls.feed(text))

    @staticmethod
    def _add_parts(piece: Piece, parts: list[str | CallPart]) -> None:
        for part in parts:
            piece.add(part)

    def _finish(self, piece: Piece, reason: str) -> Piece:
        self.finished = True
        if self._calls is not None:
            self._add_parts(piece, self._calls.end())
            piece.ends_with_calls = self._calls.calls > 0 and not self._calls.is_open and reason == "stop"
        by_stop_string = reason == "stop" and self._shown_characters < self._decoded_characters
        piece.tokens = [
            shown for shown in self._pending if not by_stop_string or shown.offset < self._shown_characters
        ]
        self._pending = []
        piece.has_thoughts = self._has_thoughts
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
        prefixes: Sequence[Prefix],
        terms: ServiceClassTerms,
        ttft_target_seconds: float | None,
        tpot_target_seconds: float | None,
        link: ReplicaLink,
        bundle: Bundle,
        observer: Observer,
        arrived_at: float,
        account: Account,
    ) -> None:
        """Submit the sequences.

        `prefixes` are the marks of each prompt (`ReplicaLink.prefixes`). `arrived_at` is of the loop's clock. Targets are the
        client's own; None: it gave none. `account` has been charged for the prompts.
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
        self._account = account
        self._first_token_at: float | None = None
        self._outcome: str | None = None
        self._is_our_failure = False
        self._choices: dict[str, ChoiceOutput] = {}
        self._cached_tokens: dict[int, int] = {}  # by prompt
        self._token_times: dict[str, TokenTimes] = {}  # by sequence, from its first token on
        self._slowest_per_token_seconds: float | None = None
        self._scoring: dict[str, int] = {}
        """Sequences that have yet to bring the log-probabilities of their prompt, each with the prompt's number."""
        sequences, prompts = self._new_sequences(request_id, prepared.prompts, prefixes, bundle)
        self.scored_prompts: dict[int, ScoredPrompt] = {}
        """Log-probabilities that have come of the prompts' tokens, by number of the prompt."""
        self._prompts = prepared.prompts if self._scoring else ()
        self._arrive = Arrive(
            plan.model,
            plan.digest,
            tuple(sequences),
            terms.name,
            ttft_target_seconds,
            tpot_target_seconds,
            account.cache_salt(plan.cache_salt),
            account.owner(request_id),
        )
        self._ttft_target = link.core.fleet.ttft_target_seconds(self._arrive, self._longest_prompt)
        observer.accepted(plan.model, self.prompt_tokens)
        self._begin_bars(sequences)
        self._outcomes = link.submit(self._arrive, prompts)

    def _new_sequences(
        self, request_id: str, prompts: tuple[TokenIds, ...], prefixes: Sequence[Prefix], bundle: Bundle
    ) -> tuple[list[NewSequence], dict[str, TokenIds]]:
        """Return the sequences and the prompts by name; each sequence gets its choice."""
        plan = self.plan
        seed = plan.seed % 2**63 if plan.seed is not None else secrets.randbits(63)
        unscored = replace(plan.sampling, prompt_logprobs=None)
        sequences = []
        named = {}
        for prompt_index, (ids, prefix) in enumerate(zip(prompts, prefixes, strict=True)):
            own_seed = prompt_seed(seed, prompt_index)
            for sample in range(plan.samples):
                index = prompt_index * plan.samples + sample
                name = f"{request_id}-{index}"
                # A sequence that asks for log-probabilities of its prompt shares no KV, so its prompt has its own name.
                scores = sample < plan.scored_samples
                prompt = f"{request_id}/{prompt_index}" + (f"/scored-{sample}" if scores else "")
                named[prompt] = ids
                if scores:
                    self._scoring[name] = prompt_index
                sampling = plan.sampling if scores else unscored
                sequences.append(NewSequence(name, prompt, len(ids), own_seed, sampling, sample, prefix))
                self._choices[name] = ChoiceOutput(index, plan, bundle)
        return sequences, named

    def _begin_bars(self, sequences: list[NewSequence]) -> None:
        """Begin a bar of the page `/ui` for each sequence."""
        target = self._ttft_target if isfinite(self._ttft_target) else None
        for new in sequences:
            began = Began(
                new.id,
                new.prompt_length,
                self.terms.name,
                self.plan.model,
                self._account.key_name,
                target,
                self.tpot_target_seconds,
            )
            self._link.timeline.take(began, self._arrived_at)

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
    def thought_tokens(self) -> int:
        return sum(choice.thought_tokens for choice in self._choices.values())

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
            try:
                arrived = await self._outcomes.get()
            except Unread as unread:
                self._outcome = "client_too_slow"
                text = f"the client did not read: {MOST_WAITING_TOKENS} tokens of output were waiting for it; read faster"
                raise ApiError(408, text, code=self._outcome) from unread
            outcome = arrived.outcome
            if isinstance(outcome, Fail):
                error = ApiError.from_fail(outcome, PROMPT_FIELDS[self.plan.endpoint])
                self._outcome = error.code or "internal_error"
                self._is_our_failure = error.is_ours
                raise error
            choice = self._choices[outcome.id]
            if outcome.tokens and outcome.id in self._scoring:
                self._keep_scores(outcome)
            if choice.finished:
                continue
            if outcome.tokens:
                self._observe_tokens(outcome.id, arrived.at)
                self._observe_cached(choice.index // self.plan.samples, outcome.cached_tokens)
            before, thought = choice.output_tokens, choice.thought_tokens
            piece = choice.feed(outcome)
            new = choice.output_tokens - before
            self._observer.output(self.plan.model, new, choice.thought_tokens - thought)
            self._account.charge_output(new)
            if piece is None:
                continue
            if piece.finish_reason is not None:
                open_choices -= 1
                reason = piece.finish_reason
                if outcome.finish_reason is None:
                    # A stop string ended it: the replica does not know.
                    self._link.abandon(outcome.id, "stop")
                self._observe_sequence(outcome.id, reason)
            yield piece
        self._outcome = reason
        self._observe_request()

    def _keep_scores(self, delivered: Deliver) -> None:
        """Keep the log-probabilities of a sequence's prompt, which come with its first token.

        Raises:
            ApiError: the replica has sent none.
        """
        prompt_index = self._scoring.pop(delivered.id)
        ids, scores = self._prompts[prompt_index], delivered.prompt_logprobs
        if scores is None or len(scores.logprobs) != len(ids) - 1:
            self._outcome = "internal_error"
            text = "the replica sent no log-probabilities of the prompt; it may be of an earlier release"
            raise ApiError(500, text, code=self._outcome)
        self.scored_prompts[prompt_index] = ScoredPrompt(ids, scores)

    def _observe_cached(self, prompt_index: int, cached_tokens: int) -> None:
        """Count how much of a prompt was cached: the first token of any of its samples reports that."""
        if prompt_index not in self._cached_tokens:
            self._cached_tokens[prompt_index] = cached_tokens
            self._observer.prompt_cached(self.plan.model, self._prompt_lengths[prompt_index], cached_tokens)

    def _observe_tokens(self, sequence_id: str, now: float) -> None:
        model, service_class = self.plan.model, self.terms.name
        if self._first_token_at is None:
            self._first_token_at = now
            seconds = now - self._arrived_at
            self._observer.first_token(
                model,
                service_class,
                self._longest_prompt,
                seconds,
                self._ttft_target,
                is_beside_long=self._link.history.is_beside_long(sequence_id),
            )
            self._account.ttft_attained(seconds <= self._ttft_target)
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
            if self._first_token_at is None:
                broken = self._observer.ttft_attained
                self._account.ttft_attained(False)
            else:
                broken = self._observer.tpot_attained
            broken(self.plan.model, self.terms.name, self._longest_prompt, False)
        self._observer.request_ended(self.plan.model, self.plan.endpoint, self._outcome)
