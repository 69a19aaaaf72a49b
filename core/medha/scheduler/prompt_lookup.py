"""Drafts by prompt lookup: the tokens that followed the last ones of a sequence where these occurred before.

Nothing is loaded or trained. The last occurrence of each `GRAM_TOKENS` tokens is kept: for a prompt in a hash table of
numpy, which its sequences share, and for an output in a dictionary. From a place that was found, the sequence is followed
for as long as it repeats what is there, so a long quotation is found once.

A prompt is indexed piece by piece, one with each draft, so that a long one delays no step. Drafts only quote what is
indexed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from medha.wire.frames import TokenIds

GRAM_TOKENS = 3
"""Number of tokens that have to occur again."""
PIECE_TOKENS = 65_536
"""Tokens of a prompt that are indexed at once."""
_FACTORS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9))
_BITS = 64


class PromptIndex:
    """The last occurrences of runs of `GRAM_TOKENS` tokens in a prompt, as far as it is indexed."""

    def __init__(self, ids: TokenIds) -> None:
        """`ids` is int32 [n]."""
        self.ids = ids
        self.users = 0  # running sequences
        bits = max(4, (2 * len(ids) - 1).bit_length())
        self._shift = np.uint64(_BITS - bits)
        self._behind: npt.NDArray[np.int32] = np.zeros(1 << bits, dtype=np.int32)  # 0: no run has this hash
        self._indexed = 0  # runs

    def advance(self) -> None:
        """Index the next piece."""
        stop = min(self._indexed + PIECE_TOKENS, len(self.ids) - GRAM_TOKENS)
        if stop <= self._indexed:
            return
        ids = self.ids[self._indexed : stop + GRAM_TOKENS - 1]
        columns = [ids[place : place + stop - self._indexed] for place in range(GRAM_TOKENS)]
        # Where several runs have one hash, the last one stays.
        self._behind[self._hashes(columns)] = np.arange(self._indexed, stop, dtype=np.int32) + GRAM_TOKENS
        self._indexed = stop

    def find(self, gram: tuple[int, ...]) -> int | None:
        """Return the position behind the last indexed occurrence of `gram`, if it is known."""
        behind = int(self._behind[self._hashes([np.array([token], dtype=np.int32) for token in gram])[0]])
        if behind and tuple(self.ids[behind - GRAM_TOKENS : behind].tolist()) == gram:
            return behind
        return None

    def _hashes(self, columns: list[TokenIds]) -> npt.NDArray[np.uint64]:
        """Return the place of each run in the table; `columns` are their first, second, ... tokens."""
        total = np.zeros(len(columns[0]), dtype=np.uint64)
        for column, factor in zip(columns, _FACTORS, strict=True):
            total = (total ^ column.astype(np.uint64)) * factor
            total ^= total >> np.uint64(29)
        return (total * _FACTORS[0]) >> self._shift


@dataclass(slots=True)
class _Sequence:
    name: str  # of its prompt
    prompt: PromptIndex
    outputs: list[int] = field(default_factory=list)
    grams: dict[tuple[int, ...], int] = field(
        default_factory=dict
    )  # of the output -> the position behind each
    source: int | None = (
        None  # position of the token that should come next, where the sequence repeats itself
    )

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + len(self.outputs)

    def token(self, position: int) -> int:
        border = len(self.prompt.ids)
        return int(self.prompt.ids[position]) if position < border else self.outputs[position - border]

    def append(self, token: int) -> None:
        """Take the next token, and find where the last ones occurred before."""
        if self.source is not None:
            self.source = self.source + 1 if self.token(self.source) == token else None
        self.outputs.append(token)
        if self.length < GRAM_TOKENS:
            return
        gram = tuple(self.token(position) for position in range(self.length - GRAM_TOKENS, self.length))
        if self.source is None:
            self.source = self.grams.get(gram) or self.prompt.find(gram)
        self.grams[gram] = self.length

    def draft(self, tokens: int) -> tuple[int, ...]:
        """Return up to `tokens` tokens that should come next; if they reach the end, they repeat themselves."""
        if self.source is None:
            return ()
        period = self.length - self.source
        return tuple(self.token(self.source + index % period) for index in range(tokens))


class PromptLookup:
    """Drafts for the running sequences of one replica."""

    def __init__(self, draft_tokens: int) -> None:
        """`draft_tokens` is the length of a draft."""
        self._draft_tokens = draft_tokens
        self._sequences: dict[str, _Sequence] = {}
        self._prompts: dict[str, PromptIndex] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, request_id: str, name: str, ids: TokenIds) -> None:
        """Follow a sequence whose first output token comes next; `ids`, int32 [n], is the prompt `name`."""
        prompt = self._prompts.get(name)
        if prompt is None:
            prompt = self._prompts[name] = PromptIndex(ids)
        prompt.users += 1
        self._sequences[request_id] = _Sequence(name, prompt)

    def add(self, request_id: str, token: int) -> None:
        """Add an output token of a sequence that has begun."""
        self._sequences[request_id].append(token)

    def draft(self, request_id: str) -> tuple[int, ...]:
        """Return a guess at the tokens that come next; empty if the last ones did not occur before."""
        sequence = self._sequences[request_id]
        sequence.prompt.advance()
        return sequence.draft(self._draft_tokens)

    def end(self, request_id: str) -> None:
        """Stop following a sequence; does nothing if it has not begun."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        sequence.prompt.users -= 1
        if sequence.prompt.users == 0:
            del self._prompts[sequence.name]
