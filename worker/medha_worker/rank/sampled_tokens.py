"""Sampling of a step's tokens, and how the ranks that embed them learn of tokens that another rank samples.

Sampled token ids matter only on the rank that samples them and on the first stage, which embeds them; elsewhere
zeros stand for them. The tokens of a step carry a digest of all tokens sampled so far, these included, and of the
sequences they belong to, so that two of those ranks never continue with different tokens.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from medha.errors import PartFailed
from medha.wire.frames import TokenIds
from medha.wire.messages import Admit, FinishReason, StepEntry
from medha_worker.device import Device
from medha_worker.model.out_of_memory import ran_out
from medha_worker.model.sampler import NotSampled, SampledToken, SequenceSampler, TokenMask
from medha_worker.model.sampling_plan import SamplingPlan
from medha_worker.model.token_sampler import TokenSampler
from medha_worker.rank.lane_plan import PlannedEntry
from medha_worker.rank.lane_state import NewSampler

_log = logging.getLogger("medha.executor")


class TokenLink(Protocol):
    """The link that carries sampled tokens from the last stage to the first, as one rank sees it."""

    is_first_stage: bool
    is_last_stage: bool
    samples: bool  # whether this rank samples the tokens of its lane
    stages: int

    def send_tokens(self, ids: Sequence[int]) -> None: ...

    def receive_tokens(self, count: int) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Computed:
    """An entry that was computed: its last position is row `row` of hidden states, [rows, hidden]; its drafts follow."""

    planned: PlannedEntry
    hidden: Tensor
    row: int

    @property
    def entry(self) -> StepEntry:
        return self.planned.entry


@dataclass(slots=True)
class Result:
    """The tokens that were sampled for an entry, each with the reason to finish; or why there is none."""

    planned: PlannedEntry
    sampled: list[tuple[SampledToken, FinishReason | None]] = field(default_factory=list)
    failure: NotSampled | None = None

    def take(self, one: SampledToken | NotSampled) -> None:
        """Take a row's result, and record its token in its sequence."""
        if isinstance(one, NotSampled):
            self.failure = one
            return
        sequence = self.planned.sequence
        assert sequence.sampler is not None
        sequence.append(one.token)
        self.sampled.append((one, sequence.sampler.append(one.token)))

    @property
    def is_drafted_further(self) -> bool:
        """True if all tokens so far are the drafted ones, so that another one is sampled after them."""
        drafts, count = self.planned.entry.drafts, len(self.sampled)
        if not 0 < count <= len(drafts):
            return False
        token, finish_reason = self.sampled[-1]
        return token.token == drafts[count - 1] and finish_reason is None

    @property
    def tokens(self) -> list[int]:
        """The tokens, and -1 for each further row from which a token could have been sampled."""
        tokens = [one.token for one, _ in self.sampled]
        return tokens + [-1] * (1 + len(self.planned.entry.drafts) - len(tokens))


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A draft's row of logits, whose token is sampled before it is known whether the draft is right.

    Attributes:
        entry: Index of the entry.
        drafts: Number of its drafts up to the row, from 1 on.
        row: Index of the row among those of all drafts.
        sampler: The sampler of the row's token.
    """

    entry: int
    drafts: int
    row: int
    sampler: SequenceSampler


class SampledTokens:
    """Samples tokens, or expects those that another rank samples."""

    def __init__(
        self,
        logits: Callable[[Tensor], Tensor | None],
        link: TokenLink | None,
        device: Device,
        sampler: TokenSampler,
        vocab_size: int,
    ) -> None:
        """`logits` takes hidden states [rows, hidden]; it returns None on a rank that only contributes to another's."""
        self._logits = logits
        self._device = device
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._link = link
        self._expected: deque[list[PlannedEntry]] = deque()  # by step; their tokens have not arrived yet
        self._digest = 0  # of all tokens of this lane that are known here

    def sample(self, computed: Sequence[Computed]) -> list[Result]:
        """Sample the next token of each entry, and further ones as long as they are the drafted ones.

        If another rank samples, expect its tokens and return [].
        """
        link, entries = self._link, [one.planned for one in computed]
        samplers = [one.sequence.sampler for one in entries if one.sequence.sampler is not None]
        # On the host no read is saved, and tokens after wrong drafts would cost time.
        ahead = [] if self._device.is_host else _draft_rows(entries)
        # Planned while a device runs the layers, so that only kernels are left to launch after the logits.
        plan = rows = None
        if link is None or link.samples:
            plan = self._planned([*samplers, *(one.sampler for one in ahead)])
            if 0 < len(ahead) < sum(len(one.entry.drafts) for one in entries):
                chosen = [*range(len(entries)), *(len(entries) + one.row for one in ahead)]
                rows = self._device.place(torch.tensor(chosen))
        logits = None
        if link is None or link.is_last_stage:
            logits = self._logits(sampled_hidden(computed, self._device))
        if logits is None:
            assert link is not None
            for one in entries:
                one.sequence.expect()
            if link.is_first_stage:
                self._expected.append(entries)
            return []
        first_rows = len(entries)
        sampled = None
        if ahead:
            sampled = self._sampled_with_drafts(
                logits if rows is None else logits[rows], samplers, ahead, plan
            )
            if sampled is None:
                ahead, plan = [], None
        if sampled is None:
            sampled = self._sampled(logits[:first_rows], samplers, plan)
        results = [Result(one) for one in entries]
        for result, token, sampler in zip(results, sampled, samplers, strict=False):
            result.take(_explained(token, sampler))
        for draft_row, token in zip(ahead, sampled[first_rows:], strict=True):
            # Rows after a token that is not the drafted one, or could not be sampled, belong to another text.
            drafted = results[draft_row.entry]
            is_next = len(drafted.sampled) == draft_row.drafts and drafted.is_drafted_further
            if is_next and isinstance(token, SampledToken):
                drafted.take(token)
        if len(logits) > first_rows:
            self._verify_drafts(logits[first_rows:], results, {draft_row.entry for draft_row in ahead})
        if link is not None:
            tokens = [token for result in results for token in result.tokens]
            self._digest = _digest(self._digest, entries, tokens)
            link.send_tokens([*tokens, self._digest])
        return results

    def _sampled_with_drafts(
        self,
        logits: Tensor,
        samplers: Sequence[SequenceSampler],
        ahead: Sequence[DraftRow],
        plan: SamplingPlan | None,
    ) -> list[SampledToken | NotSampled] | None:
        """Sample the rows of all entries and of drafts, and read them at once; None if that fails."""
        try:
            return self._sampler.sample(logits, [*samplers, *(one.sampler for one in ahead)], plan)
        except Exception as error:  # noqa: BLE001 - the tokens before the drafts are sampled without them
            _log.warning("%d drafts could not be verified together: %s", len(ahead), error)
            return None

    def _verify_drafts(self, logits: Tensor, results: Sequence[Result], verified: Container[int]) -> None:
        """Sample one more token for each entry whose last token is the drafted one, until there is none; skip `verified` entries.

        Each token is sampled as in a step of its own: from its row of logits, which are [drafts, vocab], and with all
        tokens before it in penalties, grammar and counts. So no draft can change a text. If a token cannot be sampled,
        the next step samples it.
        """
        starts = list(accumulate([len(one.planned.entry.drafts) for one in results], initial=0))
        going = [
            index for index, one in enumerate(results) if one.is_drafted_further and index not in verified
        ]
        while going:
            rows = [starts[index] + len(results[index].sampled) - 1 for index in going]
            samplers = [
                sampler for index in going if (sampler := results[index].planned.sequence.sampler) is not None
            ]
            try:
                chosen = logits.index_select(0, self._device.place(torch.tensor(rows)))
                sampled = self._sampler.sample(chosen, samplers)
            except Exception as error:  # noqa: BLE001 - the tokens sampled so far stay
                _log.warning("drafts of %d sequences could not be verified: %s", len(going), error)
                return
            for index, one in zip(going, sampled, strict=True):
                if isinstance(one, SampledToken):
                    results[index].take(one)
            going = [
                index
                for index, one in zip(going, sampled, strict=True)
                if isinstance(one, SampledToken) and results[index].is_drafted_further
            ]

    def _planned(self, samplers: Sequence[SequenceSampler]) -> SamplingPlan | None:
        """Plan a step's sampling; return None if memory runs out, because it then runs out again when that can be contained."""
        try:
            return self._sampler.plan(samplers, self._vocab_size)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            _log.warning("memory ran out while sampling was planned: %s", error)
            return None

    def _sampled(
        self, logits: Tensor, samplers: Sequence[SequenceSampler], plan: SamplingPlan | None = None
    ) -> list[SampledToken | NotSampled]:
        """Sample a token of each row, row by row if memory runs out.

        Other ranks wait for a token of each row, so no row may raise.
        """
        try:
            return self._sampler.sample(logits, samplers, plan)
        except (MemoryError, RuntimeError) as error:
            if not ran_out(error):
                raise
            if len(samplers) == 1:
                return [NotSampled(f"too little memory to sample a token: {error}", "out_of_memory")]
            _log.warning(
                "memory ran out while %d tokens were sampled together, so each is sampled alone: %s",
                len(samplers),
                error,
            )
        # Outside the handler: inside it, the traceback would keep the failed attempt's tensors alive.
        return [
            one
            for row in range(len(samplers))
            for one in self._sampled(logits[row : row + 1], [samplers[row]])
        ]

    def learn_for(self, entries: Sequence[PlannedEntry]) -> None:
        """Wait for the tokens that entries of the first stage embed.

        Tokens of steps that have left the pipeline have arrived already; they are taken so that they do not pile up.

        Raises:
            PartFailed: the tokens do not arrive, or are not those that were sampled.
        """
        link = self._link
        if link is not None:
            while len(self._expected) > link.stages or any(one.sequence.unknown for one in entries):
                self._learn(link)

    def learn_all(self) -> None:
        """Wait for all outstanding tokens of steps that have run and that another rank samples.

        Raises:
            PartFailed: the tokens do not arrive, or are not those that were sampled.
        """
        while self._expected:
            assert self._link is not None
            self._learn(self._link)

    def _learn(self, link: TokenLink) -> None:
        """Receive the tokens of the oldest step that still expects some."""
        entries = self._expected.popleft()
        counts = [1 + len(one.entry.drafts) for one in entries]
        *tokens, digest = link.receive_tokens(sum(counts) + 1)
        self._digest = _digest(self._digest, entries, tokens)
        if digest != self._digest:
            raise PartFailed(
                f"the tokens that came for {', '.join(one.entry.id for one in entries)} are not those that were sampled: "
                "this rank and the one that samples have diverged"
            )
        received = iter(tokens)
        for one, count in zip(entries, counts, strict=True):
            one.sequence.learn(list(islice(received, count)))


def _draft_rows(entries: Sequence[PlannedEntry]) -> list[DraftRow]:
    """Return the rows whose tokens depend on earlier ones only through the logits, so that all can be sampled at once."""
    starts = accumulate([len(one.entry.drafts) for one in entries], initial=0)
    return [
        DraftRow(index, 1 + draft, start + draft, sampler.after(1 + draft))
        for index, (one, start) in enumerate(zip(entries, starts, strict=False))
        if (sampler := one.sequence.sampler) is not None and not sampler.reads_tokens
        for draft in range(len(one.entry.drafts))
    ]


def _explained(result: SampledToken | NotSampled, sampler: SequenceSampler) -> SampledToken | NotSampled:
    """Return a row's result; if a fault of its mask forbids every token, with that fault as the reason."""
    if isinstance(result, SampledToken) or sampler.mask is None or sampler.mask.fault is None:
        return result
    return NotSampled(sampler.mask.fault, "grammar")


def last_hidden(computed: Sequence[Computed], device: Device) -> Tensor:
    """Return the hidden states of the last positions of entries, of which there is at least one: [entries, hidden]."""
    together = computed[0].hidden
    if any(one.hidden is not together for one in computed):  # entries that were run alone
        return torch.stack([one.hidden[one.row] for one in computed])
    rows = [one.row for one in computed]
    if rows == list(range(len(rows))):  # decodes come first
        return together[: len(rows)]
    return together.index_select(0, device.place(torch.tensor(rows)))


def sampled_hidden(computed: Sequence[Computed], device: Device) -> Tensor:
    """Return the result of `last_hidden`, followed by the hidden states of all drafts: [entries + drafts, hidden]."""
    last = last_hidden(computed, device)
    drafted = [
        one.hidden[one.row + 1 : one.row + 1 + len(one.entry.drafts)] for one in computed if one.entry.drafts
    ]
    return torch.cat([last, *drafted]) if drafted else last


def new_samplers(
    vocab_size: int, eos_token_ids: tuple[int, ...], mask_for: Callable[[Admit], TokenMask | None]
) -> NewSampler:
    """Return the function that makes the samplers of a model's sequences."""

    def new(admit: Admit, ids: TokenIds) -> SequenceSampler | str:
        if len(ids) != admit.tokens:
            return f"the prompt has {len(ids)} ids, but {admit.tokens} were announced"
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab_size:
            return f"a token id is outside the vocabulary of {vocab_size}, or there is none"
        try:
            return SequenceSampler(
                admit.sampling,
                seed=admit.seed,
                sample_index=admit.sample_index,
                tokens=ids,
                prompt_length=admit.prompt_length,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
                mask=mask_for(admit),
            )
        except ValueError as error:
            return str(error)

    return new


def _digest(before: int, entries: Sequence[PlannedEntry], tokens: Sequence[int]) -> int:
    """Return the CRC-32 digest `before`, extended by the sequences that are sampled next and their tokens."""
    names = "\0".join([one.entry.id for one in entries])
    return zlib.crc32(np.array(tokens, dtype=np.int64).tobytes(), zlib.crc32(names.encode(), before))
