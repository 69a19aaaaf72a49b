"""Drafts by prompt lookup: the tokens that followed the longest run of a sequence's last tokens that occurred before.

Nothing is loaded or trained. The texts that are searched are, in this order: the sequence's own output, its prompt, whose index
all its sequences share, and the outputs of finished requests that may share KV with it. The longest run that occurs in one of
them counts (`medha.scheduler.text_index`); if several are as long, the last one in the first of these texts. The tokens after
that place are the guesses for as long as they turn out right, or until a longer run is found elsewhere.

Prompts are indexed piece by piece: the first piece as a sequence begins, the others one at a time, prompts in turn. So the time of a
step does not grow with the length of prompts, nor with the number of those that are not indexed. Drafts only quote what is
indexed.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from medha.scheduler.text_index import RUN_TOKENS, RunHashes, TextIndex
from medha.wire.frames import TokenIds

PIECE_TOKENS = 16_384
"""Tokens of a prompt that are indexed at once."""
FINISHED_TOKENS = 65_536
"""Tokens of finished outputs that are indexed together; the last one or two such indexes of a salt are kept."""
MOST_SALTS = 16
"""Cache salts whose finished outputs are kept: those that were used last."""
_FIRST_TOKENS = 64  # room for the end of the prompt and the output, which doubles; tables have as many places
_LONGEST = RUN_TOKENS[-1]


class _Prompt:
    """A prompt, and the number of running sequences that have it."""

    __slots__ = ("index", "users")

    def __init__(self, ids: TokenIds) -> None:
        self.index = TextIndex(ids, len(ids))
        self.users = 0

    def advance(self) -> bool:
        """Index the next piece, if any is left; runs that end the prompt are in the indexes of its outputs."""
        stop = min(self.index.indexed + PIECE_TOKENS, self.index.length - 1)
        if stop <= self.index.indexed:
            return False
        self.index.index_until(stop)
        return True


class _Finished:
    """Outputs of finished requests: two indexes take turns, so that the oldest outputs are forgotten."""

    def __init__(self) -> None:
        self.indexes: list[TextIndex] = []  # the newest one first

    def add(self, ids: TokenIds) -> None:
        """Add an output, int32 [n]; only the end of one that is longer than an index."""
        ids = ids[-FINISHED_TOKENS:]
        if len(ids) <= RUN_TOKENS[0]:
            return
        if not self.indexes or self.indexes[0].length + len(ids) > FINISHED_TOKENS:
            self.indexes = [
                TextIndex(np.empty(FINISHED_TOKENS, dtype=np.int32), 0),
                *self.indexes[:1],
            ]
        index = self.indexes[0]
        start, index.length = index.length, index.length + len(ids)
        index.ids[start : index.length] = ids
        index.index_until(index.length - 1, start)  # nothing follows its last run


class _Sequence:
    """A prompt and its output so far, and where the sequence repeats itself or another text."""

    __slots__ = (
        "_hashes", "_lead", "_matched", "_own", "_place", "_source", "finished", "name", "prompt",
    )  # fmt: skip

    def __init__(self, name: str, prompt: _Prompt, finished: _Finished | None) -> None:
        self.name, self.prompt, self.finished = name, prompt, finished
        ids = prompt.index.ids
        self._lead = min(_LONGEST, len(ids))  # tokens of the prompt that the output's index begins with
        self._own = TextIndex(np.empty(_FIRST_TOKENS, dtype=np.int32), 0)
        self._hashes = RunHashes()
        self._source: TextIndex | None = None  # the text that the sequence repeats
        self._place = 0  # of the token that should come next, in the source
        self._matched = 0  # tokens that are known to be the same before it
        for token in ids[len(ids) - self._lead :].tolist():
            self._own.append(token)
            self._hashes.append(token)
        for row, length in enumerate(RUN_TOKENS):
            if length <= self._lead:
                self._own.put(row, self._hashes.hashes[row])

    @property
    def output(self) -> TokenIds:
        """The ids of the output, int32 [n]."""
        return self._own.ids[self._lead : self._own.length]

    def append(self, token: int) -> None:
        """Take the next token, and find where the longest run of the last ones occurred before."""
        source = self._source
        if source is not None:
            if self._place < source.length and source.ids[self._place] == token:
                self._place += 1
                self._matched += 1
                if source is self.prompt.index and self._place == source.length:
                    self._source, self._place = self._own, self._lead  # the output continues the prompt
            else:
                self._source, self._matched = None, 0
        self._own.append(token)
        self._hashes.append(token)
        self._find()

    def _find(self) -> None:
        """Index the last runs, and continue at the place after the longest one, if it is longer than the known match."""
        own, found = self._own, False
        others = () if self.finished is None else self.finished.indexes
        for row in reversed(range(len(RUN_TOKENS))):
            length, run_hash = RUN_TOKENS[row], self._hashes.hashes[row]
            if length > own.length:
                continue
            if not found and length > self._matched:
                run = own.ids[own.length - length : own.length].tobytes()
                for index in (own, self.prompt.index, *others):
                    behind = index.find(row, run_hash, run)
                    if behind:
                        self._source, self._place, self._matched = index, behind, length
                        found = True
                        break
            own.put(row, run_hash)

    def draft(self, tokens: int) -> tuple[int, ...]:
        """Return up to `tokens` tokens that should come next, if any are known; they repeat at the output's end."""
        source, own = self._source, self._own
        if source is None:
            return ()
        known: list[int] = source.ids[self._place : min(self._place + tokens, source.length)].tolist()
        if source is self.prompt.index and len(known) < tokens:
            start = self._lead
            known += own.ids[start : min(start + tokens - len(known), own.length)].tolist()
        if source is self.prompt.index or source is own:
            return tuple((known * -(-tokens // len(known)))[:tokens])
        return tuple(known)


class PromptLookup:
    """Drafts for the running sequences of one replica."""

    def __init__(self, draft_tokens: int) -> None:
        """`draft_tokens` is the length of a draft."""
        self._draft_tokens = draft_tokens
        self._sequences: dict[str, _Sequence] = {}
        self._prompts: dict[str, _Prompt] = {}
        self._unindexed = OrderedDict[str, _Prompt]()  # those of which a piece may be left
        self._finished = OrderedDict[str, _Finished]()  # by cache salt, the one used last at the end

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, request_id: str, name: str, ids: TokenIds, salt: str | None = None) -> None:
        """Follow a sequence whose first output token comes next.

        Args:
            request_id: the sequence.
            name: the name of its prompt.
            ids: the prompt, int32 [n].
            salt: requests of one salt search each other's finished outputs; None: it shares nothing with others.
        """
        prompt = self._prompts.get(name)
        if prompt is None:
            prompt = self._prompts[name] = self._unindexed[name] = _Prompt(ids)
            prompt.advance()
        prompt.users += 1
        finished = None if salt is None else self._finished_of(salt)
        self._sequences[request_id] = _Sequence(name, prompt, finished)

    def _finished_of(self, salt: str) -> _Finished:
        """Return the finished outputs of a salt, which is the one used last now."""
        finished = self._finished.setdefault(salt, _Finished())
        self._finished.move_to_end(salt)
        if len(self._finished) > MOST_SALTS:
            self._finished.popitem(last=False)
        return finished

    def add(self, request_id: str, token: int) -> None:
        """Add an output token of a sequence that has begun."""
        self._sequences[request_id].append(token)

    def index_piece(self) -> bool:
        """Index the next piece of one prompt, of all of them in turn; return False if they are indexed."""
        while self._unindexed:
            name, prompt = self._unindexed.popitem(last=False)
            if prompt.advance():
                self._unindexed[name] = prompt
                return True
        return False

    def draft(self, request_id: str) -> tuple[int, ...]:
        """Return a guess at the tokens that come next; empty if nothing is known."""
        return self._sequences[request_id].draft(self._draft_tokens)

    def end(self, request_id: str, *, is_finished: bool = True) -> None:
        """Stop following a sequence; does nothing if it has not begun.

        Others may quote its output if it `is_finished`.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        sequence.prompt.users -= 1
        if sequence.prompt.users == 0:
            del self._prompts[sequence.name]
            self._unindexed.pop(sequence.name, None)
        if is_finished and sequence.finished is not None:
            sequence.finished.add(sequence.output)
