"""Drafts by prompt lookup: the tokens that followed the last ones of a sequence where these occurred before.

Nothing is loaded or trained. The last occurrence of each `GRAM_TOKENS` tokens is kept: for a prompt in a hash table of
numpy, which its sequences share, and for an output in a dictionary. From a place that was found, the sequence is followed
for as long as it repeats what is there, so a long quotation is found once.

A prompt is indexed piece by piece, one with each draft, so that a long one delays no step. Drafts only quote what is
indexed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from medha.wire.frames import TokenIds

GRAM_TOKENS = 3
"""Number of tokens that have to occur again."""
PIECE_TOKENS = 65_536
"""Tokens of a prompt that are indexed at once."""
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_FOLD = 29
_BITS = 64
_MASK = (1 << _BITS) - 1


class PromptIndex:
    """The last occurrences of runs of `GRAM_TOKENS` tokens in a prompt, as far as it is indexed."""

    def __init__(self, ids: TokenIds) -> None:
        """`ids` is int32 [n]."""
        self.ids = ids
        self.users = 0  # running sequences
        bits = max(4, (2 * len(ids) - 1).bit_length())
        self._shift = _BITS - bits
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
        behind = int(self._behind[self._hash(gram)])
        if behind and tuple(self.ids[behind - GRAM_TOKENS : behind].tolist()) == gram:
            return behind
        return None

    def _hash(self, gram: tuple[int, ...]) -> int:
        """Return the place of a run in the table: for one run, numpy takes ten times as long."""
        total = 0
        for token, factor in zip(gram, _FACTORS, strict=True):
            total = (total ^ token) * factor & _MASK
            total ^= total >> _FOLD
        return (total * _FACTORS[0] & _MASK) >> self._shift

    def _hashes(self, columns: list[TokenIds]) -> npt.NDArray[np.uint64]:
        """Return the place of each run in the table, as `_hash` does; `columns` are their first, second, ... tokens."""
        total = np.zeros(len(columns[0]), dtype=np.uint64)
        for column, factor in zip(columns, _FACTORS, strict=True):
            total = (total ^ column.astype(np.uint64)) * np.uint64(factor)
            total ^= total >> np.uint64(_FOLD)
        return (total * np.uint64(_FACTORS[0])) >> np.uint64(self._shift)


class _Sequence:
    """A prompt and its output so far, and where the sequence repeats itself."""

    __slots__ = ("_border", "_last", "_outputs", "_source", "grams", "name", "prompt")

    def __init__(self, name: str, prompt: PromptIndex) -> None:
        self.name, self.prompt = name, prompt  # of the prompt
        self._border = len(prompt.ids)
        self._last = tuple(prompt.ids[1 - GRAM_TOKENS :].tolist())  # the tokens before the next one
        self._outputs: list[int] = []
        self.grams: dict[tuple[int, ...], int] = {}  # of the output -> the position behind each
        self._source: int | None = None  # position of the token that should come next

    def append(self, token: int) -> None:
        """Take the next token, and find where the last ones occurred before."""
        source = self._source
        if source is not None:
            source = source + 1 if self._tokens(source, 1) == [token] else None
        self._outputs.append(token)
        gram = (*self._last, token)
        self._last = gram[1 - GRAM_TOKENS :]
        if len(gram) == GRAM_TOKENS:
            if source is None:
                source = self.grams.get(gram) or self.prompt.find(gram)
            self.grams[gram] = self._border + len(self._outputs)
        self._source = source

    def draft(self, tokens: int) -> tuple[int, ...]:
        """Return `tokens` tokens that should come next, if any are known; those that reach the end repeat themselves."""
        if self._source is None:
            return ()
        known = self._tokens(self._source, tokens)
        return tuple((known * -(-tokens // len(known)))[:tokens])

    def _tokens(self, start: int, count: int) -> list[int]:
        """Return up to `count` tokens from position `start` on."""
        if start >= self._border:
            return self._outputs[start - self._border : start - self._border + count]
        known: list[int] = self.prompt.ids[start : start + count].tolist()
        return known if len(known) == count else known + self._outputs[: count - len(known)]


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
